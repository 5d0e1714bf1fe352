-- Take the lease with this token from its holder: free at its expiry, or at once.
--
-- KEYS: lease, line and waiters.  ARGV: the token, '1' for at once, how long a free row with a line is kept (ms).
-- Answers 1, or 0 when there is no such lease in force.

local lease, line, waiters = KEYS[1], KEYS[2], KEYS[3]
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local row = redis.call('HMGET', lease, 'claim_id', 'expires_at', 'fencing_token')
if not row[1] or tonumber(row[2]) <= now or row[3] ~= ARGV[1] then
  return 0
end
redis.call('HDEL', lease, 'claim_id')
if ARGV[2] ~= '1' then
  redis.call('HSET', lease, 'claim_id', '')  -- a claim that nobody has
  return 1
end
local next_claim = redis.call('ZRANGE', line, 0, 0)[1]
if not next_claim then
  redis.call('DEL', lease)
  return 1
end
redis.call('HDEL', lease, 'holder', 'info')
redis.call('HSET', lease, 'expires_at', string.format('%.6f', now))
redis.call('PEXPIRE', lease, ARGV[3])
local channel = (redis.call('HGET', waiters, next_claim) or ''):match(' (.+)$')
if channel then
  redis.pcall('PUBLISH', channel, lease)
end
return 1
