-- Give each claim permits of its name if enough are left, and enough for the live waiters that stand before it.
--
-- What is decided here is what `decide` in dibs/stores/permits.py decides; a test compares them.
--
-- KEYS: lease, line and waiters of each request, then the counter of tokens.
-- ARGV: the grace of the line (s), how long a forgotten line is kept (ms), then of each request its claim id, ttl (s),
--       holder, info, channel, ticket, how many permits the name has, how many it takes, and '1' to make that number the
--       name's; '' stands for none.
-- Answers one text a request: 'G token acquired_at slot', 'H token acquired_at free_in ticket ahead holder', 'M permits'
-- where the name has another number of permits (0: it is a lock), or 'E error'.

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

local function acquire(lease, line, waiters, claim, ttl, holder, info, channel, ticket, permits, take, resize)
  local head = redis.call('HMGET', lease, 'permits', 'last_slot', 'expires_at')
  local known = tonumber(head[1] or head[3] and 0)  -- nil for a name that is new; a lock's row says when it expires
  local last_slot = tonumber(head[2] or 0)
  local leases, over = look(now, lease, last_slot)
  local taken, is_taken, mine, first = 0, {}, nil, nil
  for _, one in ipairs(leases) do
    taken = taken + one.take
    is_taken[one.slot] = true
    if one.claim == claim then
      mine = one
    end
    if not first or one.expires_at < first.expires_at then
      first = one
    end
  end

  if known and known ~= permits and not mine and (known == 0 or resize == '') then
    return string.format('M %d', known)
  end

  if mine then
    local key = lease .. mine.slot
    if take < mine.take then
      -- It gives permits back, which must go through when Redis is out of memory, and so begins with a write that
      -- needs none. (It never gets more without asking anew.)
      redis.call('PERSIST', key)
      redis.call('HSET', key, 'take', take)
      taken = taken - mine.take + take
    end
    if now + ttl > mine.expires_at then  -- a repetition, however late, never shortens what a renewal gave
      redis.call('HSET', key, 'expires_at', string.format('%.6f', now + ttl))
    end
    leave_line(line, waiters, claim)
    if known > taken then
      tell_next(now, lease, line, waiters, grace)
    end
    local row = redis.call('HMGET', key, 'fencing_token', 'acquired_at')
    return string.format('G %s %s %d', row[1], row[2], mine.slot)
  end

  local spare = permits - taken - take
  local own = redis.call('ZSCORE', line, claim)
  local place = math.min(tonumber(ticket) or math.huge, tonumber(own or math.huge))
  local kept, dead = true, nil
  if spare >= 0 then
    kept, dead = is_kept(line, waiters, place, spare)
  end
  if not kept then
    local token = next_token()  -- under OOM it is this first write that Redis refuses; nothing has been changed then
    local slot = 1
    while is_taken[slot] do
      slot = slot + 1
    end
    for _, ended in ipairs(over) do
      redis.call('DEL', lease .. ended)
    end
    last_slot = leases[1] and leases[#leases].slot or 0
    redis.call('HSET', lease, 'permits', permits, 'last_slot', math.max(slot, last_slot))
    redis.call('PERSIST', lease)
    local key = lease .. slot
    redis.call('DEL', key)
    redis.call('HSET', key, 'claim_id', claim, 'holder', holder, 'fencing_token', token,
      'acquired_at', since, 'expires_at', string.format('%.6f', now + ttl), 'take', take)
    if info ~= '' then
      redis.call('HSET', key, 'info', info)
    end
    leave_line(line, waiters, claim)
    for _, silent in ipairs(dead) do
      leave_line(line, waiters, silent)
    end
    if spare > 0 then
      tell_next(now, lease, line, waiters, grace)
    end
    return string.format('G %s %s %d', token, since, slot)
  end

  if known ~= permits then
    redis.call('HSET', lease, 'permits', permits)
  end
  local front = redis.call('ZRANGE', line, 0, 0, 'WITHSCORES')
  local ahead = front[1] and tonumber(front[2]) < place
  if channel ~= '' then
    own = enter_line(line, waiters, claim, take, channel, own or ticket)
    keep_line(line, waiters)
  end
  local seen, free_in = {}, grace  -- what is there is kept for those ahead, who ask within the grace
  if spare < 0 and first then
    seen = redis.call('HMGET', lease .. first.slot, 'fencing_token', 'acquired_at', 'holder')
    free_in = first.expires_at - now
  end
  return string.format('H %s %s %.6f %s %s %s', seen[1] or '0', seen[2] or '0', free_in, own or '-',
    ahead and '1' or '0', seen[3] or '')
end

local answers = {}
local argument = 3
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
