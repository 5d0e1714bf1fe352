-- Put jobs, all or none.
--
-- Said of each put: its id, what to do about keys that are taken, how many jobs; of each job '' (as the one before) or
-- 'priority max_tries due key group', where +N means in so many microseconds, and its payload.
-- Answers 'P' and the ids ('FIRST+COUNT', or all of them), or 'K', '1' if it is claimed, the id, and the key that is taken.

if kind == 'put' then
  local plans = {}  -- by text

  local function plan_of(text)
    local plan = plans[text]
    if not plan then
      plan = {}
      plan.priority, plan.max_tries, plan.due, plan.key, plan.group = text:match('^(%S+) (%S+) (%S+) (%S+) (%S+)$')
      if plan.due:sub(1, 1) == '+' then
        plan.due = text_of(now + tonumber(plan.due))
      end
      plans[text] = plan
    end
    return plan
  end

  -- The live jobs that have one of these keys.
  local function holders_of(all)
    local wanted = {}
    for _, plan in ipairs(all) do
      if plan.key ~= '-' then
        wanted[#wanted + 1] = plan.key
      end
    end
    local by_key = {}
    for index, id in ipairs(fields_of(keys, wanted)) do
      by_key[wanted[index]] = id or nil
    end
    return by_key
  end

  -- The jobs that are to be replaced, by their ids; or the answer that one may not be.
  local function replaced_by(all, holders, conflict)
    local found = {}
    for _, plan in ipairs(all) do
      local id = holders[plan.key]
      if id and conflict ~= 'keep' then
        found[id] = jobs_of({id})[1]
        local busy = found[id] and is_claimed(found[id])
        if busy or conflict ~= 'replace' then
          return nil, 'K ' .. (busy and '1 ' or '0 ') .. id .. ' ' .. plan.key
        end
      end
    end
    return found
  end

  local function become(id, job, plan)
    job.priority, job.max_tries, job.due, job.key, job.group =
      plan.priority, plan.max_tries, plan.due, plan.key, plan.group
    make_due(id, job)
  end

  local function change_group(id, old, new)
    if old == new then
      return
    end
    if old ~= '-' then
      left_groups[old] = left_groups[old] or {}
      add(left_groups[old], id)
    end
    if new ~= '-' then
      put_into(head .. ':group:' .. new, id, id)
    end
  end

  local function put(at)
    local name, conflict, count = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
    local known = recall(puts, name)
    if known then
      write_again()
      return 'P ' .. known
    end
    local all, first_word = {}, at + 3
    for index = 1, count do
      local text = ARGV[first_word + 2 * (index - 1)]
      all[index] = text == '' and all[index - 1] or plan_of(text)
    end
    local holders = holders_of(all)
    local replaced, refusal = replaced_by(all, holders, conflict)
    if refusal then
      write_again()
      return refusal
    end

    local last_id = math.max(tonumber(redis.call('HGET', head, 'last_id') or 0), now - 1)
    local ids, new, changed, created = {}, 0, 0, text_of(now)
    for index, plan in ipairs(all) do
      local id, payload = holders[plan.key], ARGV[first_word + 2 * index - 1]
      if not id then
        new = new + 1
        id = text_of(last_id + new)
        local job = {state = 'live', tries = 0, max_tries = plan.max_tries, crashes = 0, token = 0, due = plan.due,
          expires = 0, claim = '-', holder = '-', ended = 0, priority = plan.priority, created = created, put = name,
          key = plan.key, group = plan.group}
        make_due(id, job)
        write_row(id, job)
        add(set, id .. ':payload', payload)
        if plan.group ~= '-' then
          put_into(head .. ':group:' .. plan.group, id, id)
        end
        if plan.key ~= '-' then
          add(taken_keys, plan.key, id)
        end
      elseif conflict == 'replace' then
        changed = changed + 1
      end
      ids[index] = id
    end
    if new + changed > 0 then
      -- Under OOM it is this first write that Redis refuses; nothing has been changed then.
      redis.call('HSET', head, 'last_id', text_of(last_id + new))
      redis.call('PERSIST', head)
      for index, plan in ipairs(all) do
        local id = ids[index]
        local job = replaced[id]
        if job then
          take_away(id, job)
          change_group(id, job.group, plan.group)
          off_puts[job.put] = (off_puts[job.put] or 0) + 1
          job.tries, job.crashes, job.claim, job.put = 0, 0, '-', name
          become(id, job, plan)
          write_row(id, job)
          add(set, id .. ':payload', ARGV[first_word + 2 * index - 1])
          add(unset, id .. ':error')
        end
      end
      write_all()
    end
    local text = new == count and count > 1 and ids[1] .. '+' .. count or table.concat(ids, ' ')
    if new + changed > 0 then
      remember(puts, name, new + changed, text)
      tell()
    else
      write_again()
    end
    return 'P ' .. text
  end

  verb, size = put, function(at) return 3 + 2 * ARGV[at + 2] end
end
