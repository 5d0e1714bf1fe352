-- Delete the rows that were free for long enough and for which nobody waits. Tokens come from a counter that stays.
--
-- KEYS: lease, line and waiters of each name.  ARGV: free for how long (s), the grace of the line (s).
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

-- Since when nobody has held any permit, and the slots that have a row; nothing while somebody does.
local function idle_since(lease, last_slot, free_since)
  local leases, over = look(now, lease, last_slot)
  if leases[1] then
    return nil
  end
  for _, slot in ipairs(over) do
    free_since = math.max(free_since, tonumber(redis.call('HGET', lease .. slot, 'expires_at')))
  end
  return free_since, over
end

for key = 1, #KEYS, 3 do
  local lease, line, waiters = KEYS[key], KEYS[key + 1], KEYS[key + 2]
  -- Of a key that is not ours it gives an error, which has none of these.
  local row = redis.pcall('HMGET', lease, 'expires_at', 'permits', 'last_slot', 'free_since')
  local free_since, over = tonumber(row[1] or ''), {}
  if row[2] then
    free_since, over = idle_since(lease, tonumber(row[3] or 0), tonumber(row[4] or 0))
  end
  -- A lock's line is waited for from when it is free, that of a pool from when somebody has asked.
  if free_since and free_since <= now - ARGV[1] and not is_waited_for(waiters, row[2] and 0 or free_since) then
    for _, slot in ipairs(over) do
      redis.call('DEL', lease .. slot)
    end
    deleted = deleted + redis.call('DEL', lease)
    redis.call('DEL', line, waiters)
  end
end
return deleted
