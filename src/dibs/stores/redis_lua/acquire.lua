-- Make each claim the holder of its name if the name is free and nobody alive stands before it in line.
--
-- KEYS: lease, line and waiters of each request, then the counter of tokens.
-- ARGV: the grace of the line (s), how long a forgotten line is kept (ms), then of each request its claim id, ttl (s),
--       holder, info, channel and ticket; '' stands for none.
-- Answers one text a request: 'G token acquired_at', 'H token acquired_at free_in ticket ahead holder', 'M permits'
-- where the name has permits, or 'E error'.

local ends = {}  -- by ttl

-- Whether a live waiter stands before this place in line. The dead it finds there lose their place.
local function is_ahead(line, waiters, claim, place, free_since)
  while true do
    local first = redis.call('ZRANGE', line, 0, 0, 'WITHSCORES')
    if not first[1] or first[1] == claim or tonumber(first[2]) >= place then
      return false
    end
    local seen_at = (redis.call('HGET', waiters, first[1]) or '0'):match('^%S+')
    if now < math.max(free_since, tonumber(seen_at)) + grace then
      return true
    end
    redis.call('ZREM', line, first[1])
    redis.call('HDEL', waiters, first[1])
  end
end

-- Whoever is granted takes the line before it along.
local function leave_line(line, waiters, place)
  local passed = redis.call('ZRANGEBYSCORE', line, '-inf', place)
  if #passed > 0 then
    redis.call('ZREMRANGEBYSCORE', line, '-inf', place)
    for _, claim in ipairs(passed) do
      redis.call('HDEL', waiters, claim)
    end
  end
end

local function acquire(lease, line, waiters, claim, ttl, holder, info, channel, ticket)
  local row = redis.call('HMGET', lease, 'claim_id', 'expires_at', 'fencing_token', 'acquired_at', 'holder',
    'permits')
  if row[6] then
    return 'M ' .. row[6]
  end
  local until_then = ends[ttl]
  if not until_then then
    until_then = string.format('%.6f', now + ttl)
    ends[ttl] = until_then
  end
  local expires_at = tonumber(row[2] or 0)
  local mine = row[1] == claim
  local free = not row[1] or expires_at <= now
  local lined_up = row[2] and redis.call('ZCARD', line) > 0  -- where there is a line, there is a row
  local place = lined_up and redis.call('ZSCORE', line, claim) or nil

  if mine then
    -- A repetition, however late, never shortens what a renewal gave. It is written in any case: see grants.lua on WAIT.
    redis.call('HSET', lease, 'expires_at', now + ttl > expires_at and until_then or row[2])
    if ticket ~= '' then
      leave_line(line, waiters, place or ticket)
    end
    return 'G ' .. row[3] .. ' ' .. row[4]
  end

  local ahead = free and lined_up
    and is_ahead(line, waiters, claim, tonumber(place) or tonumber(ticket) or math.huge, expires_at)
  if free and not ahead then
    -- Under OOM it is this first write that Redis refuses; nothing has been changed then.
    local token = next_token()
    if row[2] then
      redis.call('DEL', lease)
    end
    redis.call('HSET', lease, 'claim_id', claim, 'holder', holder, 'fencing_token', token,
      'acquired_at', since, 'expires_at', until_then)
    if info ~= '' then
      redis.call('HSET', lease, 'info', info)
    end
    if lined_up then
      leave_line(line, waiters, place or (ticket ~= '' and ticket) or '+inf')
    end
    return 'G ' .. token .. ' ' .. since
  end

  if channel ~= '' then
    -- Who waits for a held name need not say that it is alive: only when it is free does that count.
    if free or not place then
      place = enter_line(line, waiters, claim, '1', channel, place or ticket)
    end
    keep_line(line, waiters)
  end
  local free_in = expires_at - now
  if free then  -- kept for those ahead: they have the rest of the grace; after it only those count who asked just now
    free_in = free_in + grace
    if free_in <= 0 then
      free_in = grace
    end
  elseif place then
    ahead = redis.call('ZRANK', line, claim) > 0
  end
  return string.format('H %s %s %.6f %s %s %s', row[3] or '0', row[4] or '0', free_in, place or '-',
    ahead and '1' or '0', free and '' or row[5] or '')
end

local answers = {}
local argument = 3
for key = 1, #KEYS - 1, 3 do
  local fine, answer = pcall(acquire, KEYS[key], KEYS[key + 1], KEYS[key + 2], unpack(ARGV, argument, argument + 5))
  if not fine then
    answer = 'E ' .. (type(answer) == 'table' and answer.err or tostring(answer))
  end
  answers[#answers + 1] = answer
  argument = argument + 6
end
return answers
