-- What people see of each lease in force.
--
-- KEYS: lease and line of each name.
-- Answers for each name a list of its leases: of each its slot, holder, token, acquired_at, expires_at, expires_in, info,
-- how many permits it takes, and how many wait for the name.

local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6

local function show(key, slot, line, shown)
  -- Of a key that is not ours it gives an error, which has none of these.
  local row = redis.pcall('HMGET', key,
    'claim_id', 'expires_at', 'holder', 'fencing_token', 'acquired_at', 'info', 'take')
  if row[1] and tonumber(row[2]) > now then
    shown[#shown + 1] = {slot, row[3], row[4], row[5], row[2], string.format('%.6f', row[2] - now),
      row[6] ~= '' and row[6], tonumber(row[7] or 1), redis.call('ZCARD', line)}
  end
end

local answers = {}
for key = 1, #KEYS, 2 do
  local lease, line, shown = KEYS[key], KEYS[key + 1], {}
  local head = redis.pcall('HMGET', lease, 'permits', 'last_slot')
  if head[1] then
    for _, slot in ipairs(slots_with_rows(lease, tonumber(head[2] or 0))) do
      show(lease .. slot, tonumber(slot), line, shown)
    end
  else
    show(lease, 1, line, shown)
  end
  answers[#answers + 1] = shown
end
return answers
