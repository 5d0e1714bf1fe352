-- What both kinds of grants need: the time, tokens, places in line. This text stands before acquire and acquire_permits.
--
-- KEYS ends with the counter of tokens.  ARGV begins with the grace of the line (s), and how long a forgotten line is
-- kept (ms).
--
-- With min_replicas, WAIT follows. It waits for what its own connection wrote last, and for nothing where that has written
-- nothing (Redis 7.2, Valkey). So a grant that is repeated on a new connection writes something, also where all is there.

local counter = KEYS[#KEYS]
local grace = tonumber(ARGV[1])
local line_keep = tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local micros = time[1] * 1e6 + time[2]
local since = string.format('%.6f', now)
local last_token = nil

-- The next token as decimal text: greater than every one before, and than the time in microseconds. A number of Lua is
-- exact to 2^53, which the time is far below; beyond, the counting is Redis's own.
local function next_token()
  last_token = last_token or tonumber(redis.call('GET', counter) or 0)
  if last_token < micros then
    redis.call('SET', counter, string.format('%.0f', micros))
    last_token = micros
  else
    last_token = redis.call('INCR', counter)
    if last_token >= 2 ^ 53 then
      return redis.call('GET', counter)
    end
  end
  return string.format('%.0f', last_token)
end

-- Stand in line, or be seen alive there; who comes back after it was passed over does so to its old place.
local function enter_line(line, waiters, claim, take, channel, ticket)
  if ticket == '' then
    local last = redis.call('ZREVRANGE', line, 0, 0, 'WITHSCORES')
    ticket = string.format('%.0f', math.max(micros, (tonumber(last[2]) or 0) + 1))
  end
  redis.call('ZADD', line, ticket, claim)
  redis.call('HSET', waiters, claim, string.format('%.6f %s %s', now, take, channel))
  return ticket
end

local function keep_line(line, waiters)
  if redis.call('PTTL', line) < line_keep / 2 then
    redis.call('PEXPIRE', line, line_keep)
    redis.call('PEXPIRE', waiters, line_keep)
  end
end
