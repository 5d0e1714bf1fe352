-- Take the lease with this token from its holder: free at its expiry, or at once.
--
-- KEYS: lease, line and waiters.
-- ARGV: the token, '1' for at once, how long a free row with a line is kept (ms), the grace of the line (s), and when a
--       lock has to end for this to be done ('': whenever it does).
-- Answers 1, or 0 when there is no such lease in force.

local lease, line, waiters = KEYS[1], KEYS[2], KEYS[3]
local row_keep = ARGV[3]
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6

local function take_away(row)
  redis.call('HDEL', row, 'claim_id')
  redis.call('HSET', row, 'claim_id', '')  -- a claim that nobody has
  return 1
end

local head = redis.call('HMGET', lease, 'permits', 'taken', 'token:' .. ARGV[1])
if head[1] and ARGV[5] == '' then
  local slot = head[3]
  local row = slot and redis.call('HMGET', lease .. slot, 'fencing_token', 'expires_at', 'claim_id', 'take')
  if not row or row[1] ~= ARGV[1] or tonumber(row[2]) <= now then
    return 0
  end
  if ARGV[2] ~= '1' then
    disown_slot(lease, row[3])
    return take_away(lease .. slot)
  end
  local one = {slot = slot, claim = row[3], token = row[1], take = tonumber(row[4])}
  end_slots(now, lease, {one}, head[1], tonumber(head[2]), row_keep)
  tell_next(now, lease, line, waiters, tonumber(ARGV[4]))
  return 1
end

local row = redis.call('HMGET', lease, 'claim_id', 'expires_at', 'fencing_token')
if not row[1] or tonumber(row[2]) <= now or row[3] ~= ARGV[1] then
  return 0
end
if ARGV[5] ~= '' and tonumber(row[2]) ~= tonumber(ARGV[5]) then
  return 0
end
if ARGV[2] ~= '1' then
  return take_away(lease)
end
local next_claim = redis.call('ZRANGE', line, 0, 0)[1]
if not next_claim then
  redis.call('DEL', lease)
  return 1
end
redis.call('HDEL', lease, 'claim_id', 'holder', 'info')
redis.call('HSET', lease, 'expires_at', string.format('%.6f', now))
redis.call('PEXPIRE', lease, row_keep)
local channel = (redis.call('HGET', waiters, next_claim) or ''):match('^%S+ %S+ (.+)$')
if channel then
  redis.pcall('PUBLISH', channel, lease)
end
return 1
