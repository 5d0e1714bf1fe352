-- What scripts do with names that have permits. This text stands before theirs.
--
-- Such a name's own key is a hash of `permits` (how many there are), `last_slot` (the greatest slot that has a row) and
-- `free_since` (when the last row went). The row of a slot is the lease of a claim, with `take`, at that key with the
-- slot behind it; rows beyond `last_slot` count for nothing. Where there is no row, the hash is forgotten after a while;
-- where there is one, never.

-- The leases in force, and the slots of those that are over.
local function look(now, lease, last_slot)
  local leases, over = {}, {}
  for slot = 1, last_slot do
    local row = redis.call('HMGET', lease .. slot, 'claim_id', 'expires_at', 'take')
    local expires_at = tonumber(row[2])
    if row[1] and expires_at > now then
      leases[#leases + 1] = {slot = slot, claim = row[1], expires_at = expires_at, take = tonumber(row[3])}
    elseif row[1] then
      over[#over + 1] = slot
    end
  end
  return leases, over
end

-- Delete the row of a slot. With it, a name that nobody holds is idle.
local function end_slot(now, lease, slot, last_slot, idle_keep)
  redis.call('DEL', lease .. slot)
  if slot < last_slot then
    return
  end
  repeat
    last_slot = last_slot - 1
  until last_slot == 0 or redis.call('HGET', lease .. last_slot, 'take')
  redis.call('HSET', lease, 'last_slot', last_slot)
  if last_slot == 0 then
    redis.call('HSET', lease, 'free_since', string.format('%.6f', now))
    redis.call('PEXPIRE', lease, idle_keep)
  end
end

-- Whether the claim in line has asked within the grace, how many permits it takes, and where it is told.
local function waiter_of(now, waiters, claim, grace)
  local seen_at, take, channel = (redis.call('HGET', waiters, claim) or ''):match('^(%S+) (%d+) (.+)$')
  return seen_at and now < seen_at + grace, tonumber(take), channel
end

-- Tell the first in line who still asks, and nobody else. Those before it lose their place until they ask again.
local function tell_next(now, lease, line, waiters, grace)
  while true do
    local first = redis.call('ZRANGE', line, 0, 0)[1]
    if not first then
      return
    end
    local alive, _, channel = waiter_of(now, waiters, first, grace)
    if alive then
      redis.pcall('PUBLISH', channel, lease)  -- a hint: that it may not be sent is no reason to fail
      return
    end
    redis.call('ZREM', line, first)
    redis.call('HDEL', waiters, first)
  end
end
