-- End the lease of each claim, and its place in line; tell whoever is next in line, and nobody else.
--
-- KEYS: lease, line and waiters of each request.
-- ARGV: how long a free row with a line is kept (ms), the grace of the line (s), then of each request its claim id, its
--       slot (0: whichever), and '' or three words: '1' if it may be in line, for how long nobody gets the name (s), and
--       what is shown meanwhile ('': what was).
-- Answers one text a request: '1' when the lease was this claim's, '0' when there was no such lease, or 'E error'.

local seen = ...  -- the row of the first, as release_alone.lua has read it
local row_keep = ARGV[1]
local grace = tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6

-- Every branch begins with a write that needs no memory, so that it goes through when Redis is out of it.
local function keep_row(row, keep, info)
  redis.call('HDEL', row, 'claim_id')
  redis.call('HSET', row, 'claim_id', '', 'expires_at', string.format('%.6f', now + keep))
  if info ~= '' then
    redis.call('HSET', row, 'info', info)
  end
end

local release_permits = nil  -- of_permits makes it (release_permits.lua), which stands before this text

local function release(lease, line, waiters, claim, slot, more)
  local in_line, keep, info, left = '0', 0, '', false
  if more ~= '' then
    in_line, keep, info = more:match('^(%d) (%S+) (.*)$')
    keep = tonumber(keep)
  end
  local row = seen or redis.call('HMGET', lease, 'claim_id', 'expires_at', 'permits', 'last_slot', 'taken')
  seen = nil
  if in_line == '1' and redis.call('ZREM', line, claim) == 1 then
    left = true
    redis.call('HDEL', waiters, claim)
  end
  if row[3] then
    release_permits = release_permits or of_permits(now, row_keep, grace, keep_row)
    return release_permits(lease, line, waiters, claim, slot, left, keep, info,
      row[3], tonumber(row[4] or 0), tonumber(row[5] or 0))
  end
  local free = not row[1] or tonumber(row[2]) <= now
  local held = not free and row[1] == claim and slot <= 1
  if held and keep > 0 then
    keep_row(lease, keep, info)
    return '1'
  end
  local next_claim = (held or (free and left)) and redis.call('ZRANGE', line, 0, 0)[1]
  if held and next_claim then
    -- The row says since when the name has been free, which is how long the line is waited for.
    redis.call('HDEL', lease, 'claim_id', 'holder', 'info')
    redis.call('HSET', lease, 'expires_at', string.format('%.6f', now))
    redis.call('PEXPIRE', lease, row_keep)
  elseif not next_claim and (held or (free and left)) then
    redis.call('DEL', lease)
  end
  if next_claim then
    local channel = (redis.call('HGET', waiters, next_claim) or ''):match('^%S+ %S+ (.+)$')
    if channel then
      redis.pcall('PUBLISH', channel, lease)  -- a hint: that it may not be sent is no reason not to release
    end
  end
  return held and '1' or '0'
end

local answers = {}
local argument = 3
for key = 1, #KEYS, 3 do
  local fine, answer = pcall(release, KEYS[key], KEYS[key + 1], KEYS[key + 2],
    ARGV[argument], tonumber(ARGV[argument + 1]), ARGV[argument + 2])
  if not fine then
    answer = 'E ' .. (type(answer) == 'table' and answer.err or tostring(answer))
  end
  answers[#answers + 1] = answer
  argument = argument + 3
end
return answers
