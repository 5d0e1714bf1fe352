-- Delete the rows that were free for long enough and for which nobody waits. Tokens come from a counter that stays.
--
-- KEYS: lease, line and waiters of each name.  ARGV: free for how long (s), the grace of the line (s).
-- Answers how many were deleted.

local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local deleted = 0

local function is_waited_for(waiters, free_since)
  for _, seen in ipairs(redis.call('HVALS', waiters)) do
    if now < math.max(free_since, tonumber(seen:match('^%S+'))) + ARGV[2] then
      return true
    end
  end
  return false
end

for key = 1, #KEYS, 3 do
  local expires_at = tonumber(redis.pcall('HGET', KEYS[key], 'expires_at') or '')  -- none where the key is not ours
  if expires_at and expires_at <= now - ARGV[1] and not is_waited_for(KEYS[key + 2], expires_at) then
    deleted = deleted + redis.call('DEL', KEYS[key])
    redis.call('DEL', KEYS[key + 1], KEYS[key + 2])
  end
end
return deleted
