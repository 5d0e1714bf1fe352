-- End the lease of each claim, and its place in line; tell whoever is next in line, and nobody else.
--
-- KEYS: lease, line and waiters of each request.
-- ARGV: how long a free row with a line is kept (ms), then of each request its claim id, '1' if it may be in line, and
--       for how long nobody gets the name (s).
-- Answers one text a request: '1' when the lease was this claim's, '0' when there was no such lease, or 'E error'.

local row_keep = ARGV[1]
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6

local function release(lease, line, waiters, claim, in_line, keep)
  local row = redis.call('HMGET', lease, 'claim_id', 'expires_at')
  local free = not row[1] or tonumber(row[2]) <= now
  local held = not free and row[1] == claim
  local left = in_line == '1' and redis.call('ZREM', line, claim) == 1
  if left then
    redis.call('HDEL', waiters, claim)
  end
  -- Every branch begins with a write that needs no memory, so that it goes through when Redis is out of it.
  if held and keep > 0 then
    redis.call('HDEL', lease, 'claim_id')
    redis.call('HSET', lease, 'claim_id', '', 'expires_at', string.format('%.6f', now + keep))
    return '1'
  end
  local next_claim = (held or (free and left)) and redis.call('ZRANGE', line, 0, 0)[1]
  if held and next_claim then
    -- The row says since when the name has been free, which is how long the line is waited for.
    redis.call('HDEL', lease, 'claim_id', 'holder', 'info')
    redis.call('HSET', lease, 'expires_at', string.format('%.6f', now))
    redis.call('PEXPIRE', lease, row_keep)
  elseif held then
    redis.call('DEL', lease)
  end
  if next_claim then
    local channel = (redis.call('HGET', waiters, next_claim) or ''):match(' (.+)$')
    if channel then
      redis.pcall('PUBLISH', channel, lease)  -- a hint: that it may not be sent is no reason not to release
    end
  end
  return held and '1' or '0'
end

local answers = {}
local argument = 2
for key = 1, #KEYS, 3 do
  local fine, answer = pcall(release, KEYS[key], KEYS[key + 1], KEYS[key + 2],
    ARGV[argument], ARGV[argument + 1], tonumber(ARGV[argument + 2]))
  if not fine then
    answer = 'E ' .. (type(answer) == 'table' and answer.err or tostring(answer))
  end
  answers[#answers + 1] = answer
  argument = argument + 3
end
return answers
