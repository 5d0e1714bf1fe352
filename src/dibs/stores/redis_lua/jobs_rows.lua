-- How the jobs of a queue are kept. This text stands before all that scripts do with them.
--
-- KEYS: the head of the queue, a hash: `last_id`, `told` (when a hint was published last), `group_limit` (of whoever
-- parked jobs). Everything else of the queue is under that key with more behind it:
--   :jobs        a hash: of each job its row (`ID`), `ID:payload`, `ID:error`, `ID:result`
--   :priorities  a sorted set of the priorities that may have jobs in the next two, the greatest first
--   :due:P       a sorted set by due time: the live jobs of priority P that no claim has, or ever had
--   :parked:P    the same: those that are due and yet not among the first of their group
--   :claimed     a sorted set by expiry: the other live ones. Claims that expired stay until the next run puts them back
--   :claims      a hash: of each claim how many of its jobs are in :claimed, its token, when it was granted, its jobs
--   :puts        a hash: of each put how many of its jobs there are still, and their ids
--   :keys        a hash: the live job that has a key
--   :group:G     a sorted set by id: the live jobs of a group
--   :worked:G    the same: those that were claimed, of which the ones that are in :claimed still are worked
--   :dead, :done, :cancelled  sorted sets by when they ended
--   :kept        a sorted set by when those that are done or cancelled are forgotten
-- A job is in one of :due, :parked, :claimed, :dead, :done and :cancelled. Ids within sets of equal times are ordered as
-- text, and so as numbers: they have 16 digits.
--
-- ARGV: what to do, the channel of hints, how far apart they are (us), then what is said where it is done.
-- All times are in microseconds, which a number of Lua holds exactly until the year 2255. Ids and tokens are at least the
-- time when they were given, so they rise also when data was lost, unless the server's clock was set back, too.

local kind = ARGV[1]
-- What is done here, by the part that this run is about: making the functions of all of them takes longer than most runs.
local verb, size  -- carries out the request at a place in ARGV; how many words it is
local mend  -- does what all of ARGV is about

local head = KEYS[1]
local jobs, priorities, claimed = head .. ':jobs', head .. ':priorities', head .. ':claimed'
local claims, puts, keys, kept = head .. ':claims', head .. ':puts', head .. ':keys', head .. ':kept'
local channel, hint_every = ARGV[2], tonumber(ARGV[3])
local time = redis.call('TIME')
local now = time[1] * 1e6 + time[2]

-- So many jobs are put back, or forgotten, by one run.
local SWEEP_MAX = 500
-- How long the head of a queue without jobs is kept (ms).
local IDLE_KEEP = 24 * 3600 * 1000
-- Lua's stack holds so many words for one command. (Even: they often come in pairs.)
local WORDS_MAX = 4000

local function text_of(number)
  return string.format('%.0f', number)
end

local function call(command, key, words)
  for first = 1, #words, WORDS_MAX do
    redis.call(command, key, unpack(words, first, math.min(first + WORDS_MAX - 1, #words)))
  end
end

local function fields_of(key, names)
  if #names <= WORDS_MAX then
    return names[1] and redis.call('HMGET', key, unpack(names)) or {}
  end
  local found = {}
  for first = 1, #names, WORDS_MAX do
    for _, one in ipairs(redis.call('HMGET', key, unpack(names, first, math.min(first + WORDS_MAX - 1, #names)))) do
      found[#found + 1] = one
    end
  end
  return found
end

-- A row is words: '-' stands for none, and what people have chosen has a '=' before it. `claim` is that of the last take,
-- unless it was ended; `crashes` does not count it.
local ROW = '^(%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+) (%S+)$'

local function read(row)
  local state, tries, max_tries, crashes, token, due, expires, claim, holder, ended, priority, created, put, key, group =
    row:match(ROW)
  return {state = state, tries = tries, max_tries = max_tries, crashes = crashes, token = token, due = due,
    expires = expires, claim = claim, holder = holder, ended = ended, priority = priority, created = created, put = put,
    key = key, group = group}
end

local function written(job)
  return job.state .. ' ' .. job.tries .. ' ' .. job.max_tries .. ' ' .. job.crashes .. ' ' .. job.token .. ' '
    .. job.due .. ' ' .. job.expires .. ' ' .. job.claim .. ' ' .. job.holder .. ' ' .. job.ended .. ' '
    .. job.priority .. ' ' .. job.created .. ' ' .. job.put .. ' ' .. job.key .. ' ' .. job.group
end

-- Jobs by their ids, nil where there is no such job; each as one of a run sees it, so what one changes others see.
local function jobs_of(ids)
  local found = {}
  for index, row in ipairs(fields_of(jobs, ids)) do
    found[index] = row and read(row) or nil
  end
  return found
end

local function is_claimed(job)
  return job.claim ~= '-' and tonumber(job.expires) > now
end

-- What is told again to who repeats it: kept under its name until `count` jobs have been counted off.
local function remember(hash, name, count, text)
  if #text <= 64 then
    redis.call('HSET', hash, name, count .. ' ' .. text)
  else
    redis.call('HSET', hash, name, count, name .. ' ids', text)
  end
end

local function recall(hash, name)
  local kept_text = redis.call('HGET', hash, name)
  return kept_text and (kept_text:match('^%d+ (.+)$') or redis.call('HGET', hash, name .. ' ids'))
end

local function count_off(hash, ended)
  local names = {}
  for name in pairs(ended) do
    names[#names + 1] = name
  end
  local fewer, over = {}, {}
  for index, had in ipairs(fields_of(hash, names)) do
    local name = names[index]
    local count, text = (had or ''):match('^(%d+)(.*)$')
    if count and count - ended[name] > 0 then
      fewer[#fewer + 1], fewer[#fewer + 2] = name, (count - ended[name]) .. text
    elseif count then
      over[#over + 1], over[#over + 2] = name, name .. ' ids'
    end
  end
  call('HDEL', hash, over)
  call('HSET', hash, fewer)
end

-- Tell whoever waits for jobs. A hint: that it may not be sent is no reason to fail.
local function tell()
  local told = tonumber(redis.call('HGET', head, 'told') or 0)
  if told > now or now - told >= hint_every then
    redis.call('HSET', head, 'told', text_of(now))
    redis.pcall('PUBLISH', channel, head)
  end
end
