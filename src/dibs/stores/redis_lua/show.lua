-- What people see of each lease in force.
--
-- KEYS: lease and line of each name.
-- ARGV: '1' if replicas are to be waited for where a lock is kept after its release. WAIT waits for what its own connection
-- wrote last (Redis 7.2, Valkey), so something is written then, which changes nothing.
-- Answers for each name a list of its leases: of each its slot, holder, token, acquired_at, expires_at, expires_in, info,
-- how many permits it takes, how many wait for the name, and 1 if replicas are to be waited for.

local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6

-- The fields of a row. A key that is not ours may be of another type, which has none of them.
local function fields(key, ...)
  local row = redis.pcall('HMGET', key, ...)
  if row.err and not row.err:find('WRONGTYPE', 1, true) then
    error(row.err, 0)
  end
  return row
end

-- A row that somebody damaged is shown as far as it can be read, as whoever asks for the name is told of it.
local function show(key, slot, line, shown, confirmed)
  local row = fields(key, 'claim_id', 'expires_at', 'holder', 'fencing_token', 'acquired_at', 'info', 'take')
  local ends = tonumber(row[2])
  if row[1] and ends and ends > now then
    local is_kept = confirmed and row[1] == '' and row[6]
    if is_kept then
      redis.call('PEXPIRE', key, 3600 * 1000)
      redis.call('PERSIST', key)
    end
    local token = (row[4] or ''):match('^%d+$') or '0'
    local since = tonumber(row[5]) and row[5] or '0'
    shown[#shown + 1] = {slot, row[3] or '', token, since, row[2], string.format('%.6f', ends - now),
      row[6] ~= '' and row[6], tonumber(row[7] or 1), redis.call('ZCARD', line),
      is_kept and 1 or 0}
  end
end

local answers = {}
for key = 1, #KEYS, 2 do
  local lease, line, shown = KEYS[key], KEYS[key + 1], {}
  local head = fields(lease, 'permits', 'last_slot')
  if head[1] then
    for _, slot in ipairs(slots_with_rows(lease, tonumber(head[2] or 0))) do
      show(lease .. slot, tonumber(slot), line, shown, false)
    end
  else
    show(lease, 1, line, shown, ARGV[1] == '1')
  end
  answers[#answers + 1] = shown
end
return answers
