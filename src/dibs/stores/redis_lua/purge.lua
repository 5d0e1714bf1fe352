-- Delete the rows that were free for long enough and for which nobody waits. Tokens come from a counter that stays.
--
-- KEYS: lease, line and waiters of each name.
-- ARGV: free for how long (s), the grace of the line (s), how long an idle name with permits is kept (ms).
-- Answers how many names were deleted.

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

-- Since when nobody has held any permit, or, while somebody does, until when at least.
local function idle_since(lease, last_slot)
  if last_slot > 0 and redis.call('ZCARD', slots_of(lease)) ~= last_slot then
    mend(now, lease, last_slot, ARGV[3])
  end
  local last = redis.call('ZREVRANGE', slots_of(lease), 0, 0, 'WITHSCORES')
  local free_since = redis.call('HGET', lease, 'free_since')
  return math.max(tonumber(free_since or 0), tonumber(last[2] or 0))
end

for key = 1, #KEYS, 3 do
  local lease, line, waiters = KEYS[key], KEYS[key + 1], KEYS[key + 2]
  -- Of a key that is not ours it gives an error, which has none of these.
  local row = redis.pcall('HMGET', lease, 'expires_at', 'permits', 'last_slot')
  local free_since = tonumber(row[1] or '')
  if row[2] then
    free_since = idle_since(lease, tonumber(row[3] or 0))
  end
  -- A lock's line is waited for from when it is free, that of a pool from when somebody has asked.
  if free_since and free_since <= now - ARGV[1] and not is_waited_for(waiters, row[2] and 0 or free_since) then
    if row[2] then
      delete_slots(lease)
    end
    deleted = deleted + redis.call('DEL', lease)
    redis.call('DEL', line, waiters)
  end
end
return deleted
