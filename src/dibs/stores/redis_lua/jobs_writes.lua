-- What a run does to many jobs, gathered, and then written with few commands.

local set, unset  -- fields and values of :jobs; fields
local into, out_of  -- by sorted set: scores and ids; ids
local off_claims, off_puts  -- by claim and by put: how many jobs are counted off
local taken_keys, freed_keys  -- keys and ids; keys
local left_groups  -- by group: ids

local function begin()
  set, unset, into, out_of, off_claims, off_puts = {}, {}, {}, {}, {}, {}
  taken_keys, freed_keys, left_groups = {}, {}, {}
end

begin()

local function add(words, first, second)
  words[#words + 1] = first
  if second then
    words[#words + 1] = second
  end
end

local function put_into(key, score, id)
  into[key] = into[key] or {}
  add(into[key], score, id)
end

local function take_out_of(key, id)
  out_of[key] = out_of[key] or {}
  add(out_of[key], id)
end

local function write_row(id, job)
  add(set, id, written(job))
end

local function make_due(id, job)
  local due = head .. ':due:' .. job.priority
  if not into[due] then
    put_into(priorities, -job.priority, job.priority)
  end
  put_into(due, job.due, id)
end

-- The claim on a job is over, in whichever way. (It may be that another run has put it back already.)
local function unclaim(id, job)
  take_out_of(claimed, id)
  off_claims[job.claim] = (off_claims[job.claim] or 0) + 1
end

-- Take a live job out of where it is.
local function take_away(id, job)
  if redis.call('ZREM', claimed, id) == 1 then
    off_claims[job.claim] = (off_claims[job.claim] or 0) + 1
  else
    take_out_of(head .. ':due:' .. job.priority, id)
    take_out_of(head .. ':parked:' .. job.priority, id)
  end
end

-- What a live job has is for others from now on.
local function set_free(id, job)
  if job.key ~= '-' then
    add(freed_keys, job.key)
  end
  if job.group ~= '-' then
    left_groups[job.group] = left_groups[job.group] or {}
    add(left_groups[job.group], id)
  end
end

local function delete(id, job)
  add(unset, id, id .. ':payload')
  add(unset, id .. ':error', id .. ':result')
  off_puts[job.put] = (off_puts[job.put] or 0) + 1
end

-- End a job that has been taken out of where it was; a done or cancelled one is kept for so long, or deleted.
local function end_job(id, job, state, keep)
  set_free(id, job)
  if state ~= 'dead' and keep <= 0 then
    return delete(id, job)
  end
  job.state, job.claim, job.ended = state, '-', text_of(now)
  put_into(head .. ':' .. state, job.ended, id)
  if state ~= 'dead' then
    put_into(kept, text_of(now + keep), id)
  end
  write_row(id, job)
end

-- Those that are now among the first of their group are due again. `count` are the jobs that left it.
local function unpark(group, count)
  local limit = tonumber(redis.call('HGET', head, 'group_limit') or 0)
  if limit == 0 then
    return
  end
  local ids = redis.call('ZRANGE', head .. ':group:' .. group, math.max(0, limit - count), limit - 1)
  for index, job in pairs(jobs_of(ids)) do
    if redis.call('ZREM', head .. ':parked:' .. job.priority, ids[index]) == 1 then
      make_due(ids[index], job)
    end
  end
end

local function call_each(command, words_by_key)
  for key, words in pairs(words_by_key) do
    call(command, key, words)
  end
end

local function write_all()
  call_each('ZREM', out_of)
  call('HDEL', jobs, unset)
  call('HSET', jobs, set)
  call('HDEL', keys, freed_keys)
  call('HSET', keys, taken_keys)
  call_each('ZADD', into)
  if next(left_groups) then
    into = {}  -- only now is everything there that may have to be unparked
    for group, ids in pairs(left_groups) do
      call('ZREM', head .. ':group:' .. group, ids)
      call('ZREM', head .. ':worked:' .. group, ids)
      unpark(group, #ids)
    end
    call_each('ZADD', into)
  end
  count_off(claims, off_claims)
  count_off(puts, off_puts)
  if next(off_puts) and redis.call('HLEN', jobs) == 0 then
    redis.call('PEXPIRE', head, IDLE_KEEP)
  end
  begin()
end

-- Write something, and change nothing. With min_replicas, WAIT follows, which waits for what its own connection wrote last,
-- and for nothing where that has written nothing (Redis 7.2, Valkey). But what is said of jobs that are there already must
-- be known to replicas, too.
local function write_again()
  if redis.call('PEXPIRE', jobs, IDLE_KEEP) == 1 then
    redis.call('PERSIST', jobs)
  else
    redis.call('PEXPIRE', head, IDLE_KEEP)  -- which a queue without jobs has
  end
end

-- Put back the jobs whose claims have expired, and forget those that were kept for long enough; whether there may be more.
local function sweep()
  local expired = redis.call('ZRANGEBYSCORE', claimed, '-inf', now, 'LIMIT', 0, SWEEP_MAX)
  local found = jobs_of(expired)
  for index, id in ipairs(expired) do
    local job = found[index]
    take_out_of(claimed, id)
    if job then
      off_claims[job.claim] = (off_claims[job.claim] or 0) + 1
      make_due(id, job)
    end
  end
  local old = redis.call('ZRANGEBYSCORE', kept, '-inf', now, 'LIMIT', 0, SWEEP_MAX)
  found = jobs_of(old)
  for index, id in ipairs(old) do
    take_out_of(kept, id)
    if found[index] then
      take_out_of(head .. ':' .. found[index].state, id)
      delete(id, found[index])
    end
  end
  write_all()
  return #expired == SWEEP_MAX or #old == SWEEP_MAX
end
