-- What operators do to jobs, and how many there are.

if kind == 'cancel' or kind == 'revive' or kind == 'forget' or kind == 'look' or kind == 'depth' then
  -- Said: for how long they are kept (us), then ids. Answers those that were live.
  local function cancel(at)
    local cancelled, ids = {}, {unpack(ARGV, at + 1)}
    local found, seen = jobs_of(ids), {}
    for index, id in ipairs(ids) do
      local job = found[index]
      if job and job.state == 'live' and not seen[id] then
        seen[id] = true
        take_away(id, job)
        end_job(id, job, 'cancelled', tonumber(ARGV[at]))
        cancelled[#cancelled + 1] = id
      end
    end
    local may_be_had = next(left_groups)
    write_all()
    if may_be_had then
      tell()
    end
    return cancelled
  end

  -- Said: ids. Answers how many of them were dead, and are ready again.
  local function revive(at)
    local revived = 0
    for index = at, #ARGV do
      local id = ARGV[index]
      local job = jobs_of({id})[1]
      if job and job.state == 'dead' and not (job.key ~= '-' and redis.call('HGET', keys, job.key)) then
        take_out_of(head .. ':dead', id)
        job.state, job.tries, job.crashes, job.due, job.ended = 'live', 0, 0, text_of(now), 0
        make_due(id, job)
        write_row(id, job)
        if job.key ~= '-' then
          add(taken_keys, job.key, id)
        end
        if job.group ~= '-' then
          put_into(head .. ':group:' .. job.group, id, id)
        end
        write_all()
        revived = revived + 1
      end
    end
    if revived > 0 then
      tell()
    end
    return revived
  end

  -- Said: how long ago they must have ended (us), then ids. Answers how many were deleted.
  local function forget(at)
    local forgotten, ids = 0, {unpack(ARGV, at + 1)}
    local found, seen = jobs_of(ids), {}
    for index, id in ipairs(ids) do
      local job = found[index]
      if job and job.state ~= 'live' and tonumber(job.ended) <= now - tonumber(ARGV[at]) and not seen[id] then
        seen[id] = true
        take_out_of(head .. ':' .. job.state, id)
        take_out_of(kept, id)
        delete(id, job)
        forgotten = forgotten + 1
      end
    end
    write_all()
    return forgotten
  end

  -- Put in order what expired. Answers the time, and whether there may be more to put in order.
  local function look()
    return {text_of(now), sweep() and 1 or 0}
  end

  -- Answers how many jobs are ready, later, claimed and dead, and for how many us the oldest ready one has been; nothing
  -- where there are none at all.
  local function depth()
    sweep()
    if redis.call('HLEN', jobs) == 0 then
      return {}
    end
    local ready, later, oldest = redis.call('ZCOUNT', claimed, '-inf', now), 0, now
    for _, priority in ipairs(redis.call('ZRANGE', priorities, 0, -1)) do
      local due, parked = head .. ':due:' .. priority, head .. ':parked:' .. priority
      ready = ready + redis.call('ZCOUNT', due, '-inf', now) + redis.call('ZCARD', parked)
      later = later + redis.call('ZCOUNT', due, '(' .. text_of(now), '+inf')
      for _, key in ipairs({due, parked}) do
        oldest = math.min(oldest, tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or now))
      end
    end
    return {ready, later, redis.call('ZCOUNT', claimed, '(' .. text_of(now), '+inf'), redis.call('ZCARD', head .. ':dead'),
      text_of(now - oldest)}
  end

  mend = ({cancel = cancel, revive = revive, forget = forget, look = look, depth = depth})[kind]
end
