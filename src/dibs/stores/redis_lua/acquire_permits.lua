-- Give each claim permits of its name if enough are left, and enough for the live waiters that stand before it.
--
-- What is decided here is what `decide` in dibs/stores/permits.py decides; a test compares them.
--
-- KEYS: lease, line and waiters of each request, then the counter of tokens.
-- ARGV: the grace of the line (s), how long a forgotten line is kept (ms), how long an idle name (ms), then of each request
--       its claim id, ttl (s), holder, info, channel, ticket, how many permits the name has, how many it takes, and '1' to
--       make that number the name's; '' stands for none.
-- Answers one text a request: 'G token acquired_at slot', 'H token acquired_at free_in ticket ahead holder', 'M permits'
-- where the name has another number of permits (0: it is a lock), or 'E error'.

local row_keep = ARGV[3]

-- Whether more than `spare` permits are kept for live waiters before this place, and the dead who were met.
local function is_kept(line, waiters, place, spare)
  local kept, at, dead = 0, 0, {}
  while kept <= spare do
    local one = redis.call('ZRANGE', line, at, at, 'WITHSCORES')
    if not one[1] or tonumber(one[2]) >= place then
      return false, dead
    end
    local alive, take = waiter_of(now, waiters, one[1], grace)
    if alive then
      kept = kept + take
    else
      dead[#dead + 1] = one[1]
    end
    at = at + 1
  end
  return true
end

local function leave_line(line, waiters, claim)
  if redis.call('ZREM', line, claim) == 1 then
    redis.call('HDEL', waiters, claim)
  end
end

-- How many permits the name has (0 for a lock, nil for a name that is new), its last slot, how many are taken, which
-- slots are over, and which one the claim has.
local function look(lease, claim, mended)
  local head = redis.call('HMGET', lease, 'permits', 'last_slot', 'taken', 'claim:' .. claim)
  if not head[1] then
    return redis.call('HGET', lease, 'expires_at') and 0 or nil, 0, 0, {}, nil  -- which the row of a lock has
  end
  local last_slot = tonumber(head[2] or 0)
  local over = find_over(now, lease, last_slot)
  if not over and not mended then
    mend(now, lease, last_slot, row_keep)
    return look(lease, claim, true)
  end
  return tonumber(head[1]), last_slot, tonumber(head[3] or 0), over or {}, head[4]
end

local function acquire(lease, line, waiters, claim, ttl, holder, info, channel, ticket, permits, take, resize)
  local known, last_slot, taken, over, slot = look(lease, claim)
  local row = slot and redis.call('HMGET', lease .. slot, 'claim_id', 'expires_at', 'take', 'fencing_token',
    'acquired_at')
  local mine = row and row[1] == claim and tonumber(row[2]) > now
  if known and known ~= permits and not mine and (known == 0 or resize == '') then
    return string.format('M %d', known)
  end
  local front = redis.call('ZRANGE', line, 0, 0, 'WITHSCORES')

  if mine then
    taken = over[1] and end_slots(now, lease, over, known, taken, row_keep) or taken
    local fewer = tonumber(row[3]) - take
    if fewer > 0 then
      -- It gives permits back, which must go through when Redis is out of memory, and so begins with a write that
      -- needs none. (It never gets more without asking anew.)
      redis.call('PERSIST', lease .. slot)
      redis.call('HSET', lease .. slot, 'take', take)
      taken = taken - fewer
      redis.call('HSET', lease, 'taken', taken)
    end
    -- A repetition, however late, never shortens what a renewal gave. It is written in any case: see grants.lua on WAIT.
    extend_slot(lease, slot, now + ttl > tonumber(row[2]) and string.format('%.6f', now + ttl) or row[2])
    if front[1] then
      leave_line(line, waiters, claim)
      if known > taken then
        tell_next(now, lease, line, waiters, grace)
      end
    end
    return string.format('G %s %s %d', row[4], row[5], slot)
  end

  local spare = permits - taken - take
  for _, one in ipairs(over) do
    spare = spare + one.take
  end
  local own = front[1] and redis.call('ZSCORE', line, claim)
  local place = math.min(tonumber(ticket) or math.huge, tonumber(own or math.huge))
  local kept, dead = spare < 0, {}
  if front[1] and not kept then
    kept, dead = is_kept(line, waiters, place, spare)
  end
  if not kept then
    local token = next_token()  -- under OOM it is this first write that Redis refuses; nothing has been changed then
    taken = over[1] and end_slots(now, lease, over, known, taken, row_keep) or taken
    if not known then
      delete_slots(lease)
    end
    local idle = taken == 0
    last_slot = idle and 0 or last_slot
    local lowest = not idle and redis.call('ZRANGE', slots_of(lease), 0, 0, 'WITHSCORES')
    if lowest and tonumber(lowest[2]) < 0 then
      slot = lowest[1]
    else
      last_slot = last_slot + 1
      slot = last_slot
    end
    local until_then = string.format('%.6f', now + ttl)
    -- All the fields that there are, since a row may be there that counts for nothing.
    redis.call('HSET', lease .. slot, 'claim_id', claim, 'holder', holder, 'fencing_token', token,
      'acquired_at', since, 'expires_at', until_then, 'take', take, 'info', info)
    redis.call('HSET', lease, 'permits', permits, 'taken', taken + take, 'last_slot', last_slot,
      'claim:' .. claim, slot, 'token:' .. token, slot)
    redis.call('ZADD', slots_of(lease), until_then, slot)
    if idle then
      redis.call('PERSIST', lease)
    end
    if front[1] then
      leave_line(line, waiters, claim)
      for _, silent in ipairs(dead) do
        leave_line(line, waiters, silent)
      end
      if spare > 0 then
        tell_next(now, lease, line, waiters, grace)
      end
    end
    return string.format('G %s %s %d', token, since, slot)
  end

  taken = over[1] and end_slots(now, lease, over, known, taken, row_keep) or taken
  if known ~= permits then
    redis.call('HSET', lease, 'permits', permits)
  end
  if not known then
    redis.call('PEXPIRE', lease, row_keep)
  end
  local ahead = front[1] and tonumber(front[2]) < place
  if channel ~= '' then
    own = enter_line(line, waiters, claim, take, channel, own or ticket)
    keep_line(line, waiters)
  end
  local seen, free_in = {}, grace  -- what is there is kept for those ahead, who ask within the grace
  if spare < 0 and taken > 0 then
    local first = redis.call('ZRANGEBYSCORE', slots_of(lease), 0, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    seen = redis.call('HMGET', lease .. first[1], 'fencing_token', 'acquired_at', 'holder')
    free_in = tonumber(first[2]) - now
  end
  return string.format('H %s %s %.6f %s %s %s', seen[1] or '0', seen[2] or '0', free_in, own or '-',
    ahead and '1' or '0', seen[3] or '')
end

local answers = {}
local argument = 4
for key = 1, #KEYS - 1, 3 do
  local claim, ttl, holder, info, channel, ticket, permits, take, resize = unpack(ARGV, argument, argument + 8)
  local fine, answer = pcall(acquire, KEYS[key], KEYS[key + 1], KEYS[key + 2],
    claim, tonumber(ttl), holder, info, channel, ticket, tonumber(permits), tonumber(take), resize)
  if not fine then
    answer = 'E ' .. (type(answer) == 'table' and answer.err or tostring(answer))
  end
  answers[#answers + 1] = answer
  argument = argument + 9
end
return answers
