-- Claim the jobs that come first.
--
-- Said of each take: its claim, for how long (us), how many jobs (0: only what it has), its holder, how many of a group may
-- be claimed (0: any).
-- Answers the token, when it was granted, and of each job its id, row and payload in one text; or 'H' and in how many us
-- there may be one ('H -': nothing is known of); or 'A' when there was so much to put in order that it is to ask again.

if kind == 'take' then
  local CRASHES_MAX = tonumber(ARGV[4])
  -- Jobs that one take may pass over before it is content with what it has.
  local LOOK_MAX = 500
  -- Payloads of one take: of those that are larger together, the first.
  local ANSWER_BYTES_MAX = 2 ^ 24
  local PAYLOADS_AT_ONCE = 32

  local function is_behind(job, id, limit)
    if limit == 0 or job.group == '-' then
      return false
    end
    local rank = redis.call('ZRANK', head .. ':group:' .. job.group, id)
    return rank and rank >= limit
  end

  -- Whether as many of its group are worked as may be, though it is among the first: it came to be that after they were
  -- taken. `chosen` of the group are just being taken.
  local function is_busy(job, limit, chosen)
    if limit == 0 or job.group == '-' then
      return false
    end
    local count, worked = chosen, head .. ':worked:' .. job.group
    for _, other in ipairs(redis.call('ZRANGE', worked, 0, -1)) do
      if count >= limit then
        break
      elseif redis.call('ZSCORE', claimed, other) then
        count = count + 1
      else
        take_out_of(worked, other)
      end
    end
    return count >= limit
  end

  -- A job behind the first of its group is put aside until it is one of them: no take need look at it before. How many are
  -- the first is said by each take. What was put aside for one limit is for every smaller one as well; for a greater one
  -- all are put back, and whoever asks for that is told to ask again.
  local function has_put_back_the_parked(limit)
    local parked_for = tonumber(redis.call('HGET', head, 'group_limit') or 0)
    if parked_for == 0 or limit == parked_for then
      return false
    end
    if limit > 0 and limit < parked_for then
      redis.call('HSET', head, 'group_limit', limit)
      return false
    end
    local count = 0
    for _, priority in ipairs(redis.call('ZRANGE', priorities, 0, -1)) do
      local parked = head .. ':parked:' .. priority
      local some = redis.call('ZRANGE', parked, 0, LOOK_MAX - count, 'WITHSCORES')
      for index = 1, #some, 2 do
        take_out_of(parked, some[index])
        put_into(head .. ':due:' .. priority, some[index + 1], some[index])
        count = count + 1
      end
      if count > LOOK_MAX then
        break
      end
    end
    if count == 0 then
      redis.call('HDEL', head, 'group_limit')
    end
    write_all()
    return count > 0
  end

  -- A job that is ready and has no tries left.
  local function bury(id, job, crashed)
    take_out_of(head .. ':due:' .. job.priority, id)
    if crashed then
      add(set, id .. ':error', ARGV[5])
    end
    end_job(id, job, 'dead', 0)
  end

  -- The ids of what comes first, and the jobs themselves; whether anything was put in order on the way.
  local function first_of(count, limit)
    local ids, found, looked, moved = {}, {}, 0, false
    local chosen = {}  -- by group: how many
    for _, priority in ipairs(redis.call('ZRANGE', priorities, 0, -1)) do
      local due, passed = head .. ':due:' .. priority, 0
      while #ids < count do
        local some = redis.call('ZRANGEBYSCORE', due, '-inf', now, 'LIMIT', passed, count - #ids + (passed > 0 and 50 or 0))
        if #some == 0 then
          break
        end
        passed = passed + #some
        local these = jobs_of(some)
        for index, id in ipairs(some) do
          local job = these[index]
          if #ids == count then
            break
          elseif not job then  -- somebody has deleted its row
            take_out_of(due, id)
            looked, moved = looked + 1, moved or true
          elseif is_behind(job, id, limit) then
            take_out_of(due, id)
            put_into(head .. ':parked:' .. priority, job.due, id)
            looked, moved = looked + 1, 'parked'
          elseif is_busy(job, limit, chosen[job.group] or 0) then
            looked = looked + 1
          else
            local crashed = job.claim ~= '-'
            local crashes = job.crashes + (crashed and 1 or 0)
            local spent = job.max_tries ~= '0' and tonumber(job.tries) >= tonumber(job.max_tries)
            if spent or crashes < CRASHES_MAX or #ids == 0 then
              job.crashes = crashes
            end
            if spent then
              bury(id, job, crashed)
              looked, moved = looked + 1, moved or true
            elseif crashes < CRASHES_MAX or #ids == 0 then
              ids[#ids + 1], found[#found + 1] = id, job
              chosen[job.group] = (chosen[job.group] or 0) + 1
            else
              looked = looked + 1
            end
            if not spent and crashes >= CRASHES_MAX and ids[1] == id then
              return ids, found, moved  -- alone
            end
          end
        end
        if looked >= LOOK_MAX then
          return ids, found, moved
        end
      end
      if #ids == count then
        break
      end
      if passed == 0 and redis.call('ZCARD', due) == 0 and redis.call('ZCARD', head .. ':parked:' .. priority) == 0 then
        redis.call('ZREM', priorities, priority)
      end
    end
    return ids, found, moved
  end

  -- The payloads of the first of these jobs: as many as may travel together.
  local function payloads_of(ids)
    local found, bytes = {}, 0
    for first = 1, #ids, PAYLOADS_AT_ONCE do
      local names = {}
      for index = first, math.min(first + PAYLOADS_AT_ONCE - 1, #ids) do
        names[#names + 1] = ids[index] .. ':payload'
      end
      for _, payload in ipairs(redis.call('HMGET', jobs, unpack(names))) do
        bytes = bytes + #(payload or '')
        if bytes > ANSWER_BYTES_MAX and found[1] then
          return found
        end
        found[#found + 1] = payload or ''
      end
    end
    return found
  end

  -- When the next job is due, or a claim on one expires. (What is due already waits for others of its group.)
  local function next_in()
    local soonest = tonumber(redis.call('ZRANGE', claimed, 0, 0, 'WITHSCORES')[2] or math.huge)
    for _, priority in ipairs(redis.call('ZRANGE', priorities, 0, -1)) do
      local due = head .. ':due:' .. priority
      local first = redis.call('ZRANGEBYSCORE', due, '(' .. text_of(now), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
      soonest = math.min(soonest, tonumber(first or math.huge))
    end
    return soonest == math.huge and '-' or text_of(math.max(0, soonest - now))
  end

  -- What a claim already has, and has for longer now.
  local function taken_before(claim, ttl)
    local text = recall(claims, claim)
    if not text then
      return nil
    end
    local token, since, list = text:match('^(%d+) (%d+) (.+)$')
    local ids = {}
    for id in list:gmatch('%d+') do
      ids[#ids + 1] = id
    end
    local found, mine, of_mine = jobs_of(ids), {}, {}
    for index, id in ipairs(ids) do
      local job = found[index]
      if job and job.claim == claim and is_claimed(job) then
        mine[#mine + 1], of_mine[#of_mine + 1] = id, job
        job.expires = text_of(math.max(tonumber(job.expires), now + ttl))
        put_into(claimed, job.expires, id)
        write_row(id, job)
      end
    end
    if not mine[1] then
      return nil
    end
    write_all()
    local payloads, answer = payloads_of(mine), {token, since}
    for index, payload in ipairs(payloads) do
      answer[index + 2] = mine[index] .. ' ' .. written(of_mine[index]) .. ' ' .. payload
    end
    return answer
  end

  local function take(at)
    local claim, ttl, count = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
    local holder, limit = ARGV[at + 3], tonumber(ARGV[at + 4])
    local before = taken_before(claim, ttl)
    if before then
      return before
    elseif count == 0 then
      return 'H -'
    end
    if has_put_back_the_parked(limit) then
      return 'A'
    end
    local ids, found, moved = first_of(count, limit)
    local payloads = payloads_of(ids)
    local token = now
    for index in ipairs(payloads) do
      token = math.max(token, found[index].token + 1)
    end
    local answer, expires = {text_of(token), text_of(now)}, text_of(now + ttl)
    for index, payload in ipairs(payloads) do
      local id, job = ids[index], found[index]
      job.tries, job.token, job.claim, job.holder, job.expires = job.tries + 1, answer[1], claim, holder, expires
      local row = written(job)
      add(set, id, row)
      take_out_of(head .. ':due:' .. job.priority, id)
      put_into(claimed, expires, id)
      if job.group ~= '-' then
        put_into(head .. ':worked:' .. job.group, id, id)
      end
      answer[index + 2] = id .. ' ' .. row .. ' ' .. payload
    end
    if moved == 'parked' then
      redis.call('HSET', head, 'group_limit', limit)
    end
    write_all()
    if payloads[1] then
      remember(claims, claim, #payloads, answer[1] .. ' ' .. answer[2] .. ' ' .. table.concat(ids, ' ', 1, #payloads))
      return answer
    end
    return moved and 'A' or 'H ' .. next_in()
  end

  verb, size = take, function() return 5 end
end
