-- What scripts do with names that have permits. This text stands before theirs.
--
-- Such a name's own key is a hash with
--
--   permits        how many there are
--   free_since     when a row went last
--
-- and, while there are rows, with
--
--   taken          how many permits they take
--   last_slot      the greatest slot that was in use since there were none
--   claim:<claim>  the slot that the claim has
--   token:<token>  the slot that is held under that fencing token
--
-- The row of a slot is the lease of a claim, with `take`, at that key with the slot behind it. At that key with `:slots`
-- behind it is a sorted set of the slots 1 to last_slot: one that has a row by when its lease ends, one that is free by
-- its number less FREE, which is before all time. So the lowest free slot is the first, those whose time is over come
-- next, then whichever ends first; and no verb looks at more rows than it changes, however many there are.
--
-- What counts are permits, last_slot and the rows; the rest is there to find them, and is counted anew (`mend`) when
-- slots are missing from the set, or one whose time is over has no such row. Where they disagree unnoticed, a slot in
-- the set keeps its permits taken: those of a row that somebody deletes come back when its time is over. Without the
-- name's own key the set and the rows count for nothing, and who is granted a permit next deletes what is left of them.
--
-- Where there is no row, the hash is forgotten after a while; where there is one, never.

local FREE = 1e10
local WORDS_MAX = 1000  -- of one call; what Lua can unpack is not much more than 7,000

local function slots_of(lease)
  return lease .. ':slots'
end

-- Nobody holds a permit, and all has been deleted: keep how many there are, for a while.
local function become_idle(now, lease, permits, idle_keep)
  redis.call('HSET', lease, 'permits', permits, 'free_since', string.format('%.6f', now))
  redis.call('PEXPIRE', lease, idle_keep)
end

-- Call with so many of the words at a time as a call takes; with pairs of them, as their number is even.
local function in_parts(words, call)
  for first = 1, #words, WORDS_MAX do
    call(unpack(words, first, math.min(first + WORDS_MAX - 1, #words)))
  end
end

-- Count anew what the rows say. All is read before the first write, which needs no memory.
local function mend(now, lease, last_slot, idle_keep)
  local head = redis.call('HMGET', lease, 'permits', 'free_since')
  local scores, found, taken = {}, {}, 0
  for slot = 1, last_slot do
    local row = redis.call('HMGET', lease .. slot, 'claim_id', 'expires_at', 'fencing_token', 'take')
    local ends = row[1] and row[4] and tonumber(row[2])
    if ends then
      taken = taken + tonumber(row[4])
      found[#found + 1] = 'token:' .. row[3]
      found[#found + 1] = slot
      if row[1] ~= '' then
        found[#found + 1] = 'claim:' .. row[1]
        found[#found + 1] = slot
      end
    end
    scores[#scores + 1] = ends and row[2] or slot - FREE
    scores[#scores + 1] = slot
  end
  redis.call('DEL', lease, slots_of(lease))
  if taken == 0 then
    become_idle(now, lease, head[1], idle_keep)
    return
  end
  redis.call('HSET', lease, 'permits', head[1], 'taken', taken, 'last_slot', last_slot, 'free_since', head[2] or 0)
  in_parts(found, function(...) redis.call('HSET', lease, ...) end)
  in_parts(scores, function(...) redis.call('ZADD', slots_of(lease), ...) end)
end

-- The slots whose time is over, each with its row; nil where the set and the rows disagree.
local function find_over(now, lease, last_slot)
  if last_slot == 0 then
    return {}
  elseif redis.call('ZCARD', slots_of(lease)) ~= last_slot then
    return nil
  end
  local over = {}
  for _, slot in ipairs(redis.call('ZRANGEBYSCORE', slots_of(lease), 0, now)) do
    local row = redis.call('HMGET', lease .. slot, 'claim_id', 'fencing_token', 'take', 'expires_at')
    if not row[1] or tonumber(row[4]) > now then
      return nil
    end
    over[#over + 1] = {slot = slot, claim = row[1], token = row[2], take = tonumber(row[3])}
  end
  return over
end

-- Delete the rows of slots, of one at least. Without any, the name is idle. Answers how many permits are taken.
local function end_slots(now, lease, ended, permits, taken, idle_keep)
  local keys, fields, scores = {}, {}, {}
  for at, one in ipairs(ended) do
    taken = taken - one.take
    keys[at] = lease .. one.slot
    fields[2 * at - 1], fields[2 * at] = 'claim:' .. one.claim, 'token:' .. one.token
    scores[2 * at - 1], scores[2 * at] = one.slot - FREE, one.slot
  end
  local idle = taken <= 0
  if idle then
    keys[#keys + 1], keys[#keys + 2] = lease, slots_of(lease)
  end
  in_parts(keys, function(...) redis.call('DEL', ...) end)  -- needs no memory, and so goes through when there is none
  if idle then
    become_idle(now, lease, permits, idle_keep)
    return 0
  end
  in_parts(fields, function(...) redis.call('HDEL', lease, ...) end)
  in_parts(scores, function(...) redis.call('ZADD', slots_of(lease), ...) end)
  redis.call('HSET', lease, 'taken', taken, 'free_since', string.format('%.6f', now))
  return taken
end

-- The claim no longer has its slot, which stays held until its time is over.
local function disown_slot(lease, claim)
  redis.call('HDEL', lease, 'claim:' .. claim)
end

-- Another claim has the slot, under another token, until then.
local function pass_slot(lease, slot, from, to, until_then)
  redis.call('HDEL', lease, 'claim:' .. from.claim, 'token:' .. from.token)
  redis.call('HSET', lease, 'claim:' .. to.claim, slot, 'token:' .. to.token, slot)
  redis.call('ZADD', slots_of(lease), until_then, slot)
end

-- Let the row of a slot last until then. Begins with a write that changes nothing and needs no memory, as when Redis is
-- out of it, it refuses a script's first write unless that needs none, and then no other.
local function extend_slot(lease, slot, until_then)
  redis.call('PERSIST', lease .. slot)
  redis.call('HSET', lease .. slot, 'expires_at', until_then)
  redis.call('ZADD', slots_of(lease), until_then, slot)
end

-- The slots that may have a row.
local function slots_with_rows(lease, last_slot)
  if redis.pcall('ZCARD', slots_of(lease)) == last_slot then
    return redis.call('ZRANGEBYSCORE', slots_of(lease), 0, '+inf')
  end
  local slots = {}
  for slot = 1, last_slot do
    slots[slot] = slot
  end
  return slots
end

-- Delete the rows that are in the set, and the set.
local function delete_slots(lease)
  local keys = {slots_of(lease)}
  for at, slot in ipairs(redis.call('ZRANGEBYSCORE', slots_of(lease), 0, '+inf')) do
    keys[at + 1] = lease .. slot
  end
  in_parts(keys, function(...) redis.call('DEL', ...) end)
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
