-- End the claim on jobs, or let it last.
--
-- Said of each end: the token, how it ends, the delay and for how long it is kept (us), its note ('' or '=' and the note),
-- how many ids, the ids. Of each extension: the token, for how long (us), how many ids, the ids.
-- Answers the ids that the token's claim is not in force on; of an extension first when it ends.

if kind == 'finish' or kind == 'extend' then
  -- The jobs that the claim with this token is in force on, by their ids; the ids of the others.
  local function claimed_by(token, ids)
    local found, mine, gone = jobs_of(ids), {}, {}
    for index, id in ipairs(ids) do
      local job = found[index]
      if job and job.token == token and is_claimed(job) then
        mine[id] = job
      else
        gone[#gone + 1] = id
      end
    end
    return mine, gone
  end

  local function ids_said(at, count)
    local ids = {}
    for index = at, at + count - 1 do
      ids[#ids + 1] = ARGV[index]
    end
    return ids
  end

  local function finish(at)
    local token, ending, delay, keep, note = unpack(ARGV, at, at + 4)
    local count = tonumber(ARGV[at + 5])
    local mine, gone = claimed_by(token, ids_said(at + 6, count))
    for id, job in pairs(mine) do
      unclaim(id, job)
      if ending == 'done' then
        end_job(id, job, 'done', tonumber(keep))
        if note ~= '' and tonumber(keep) > 0 then
          add(set, id .. ':result', note:sub(2))
        end
      elseif ending == 'back' then
        job.tries, job.claim = job.tries - 1, '-'
        make_due(id, job)
        write_row(id, job)
      else
        if note == '' then
          add(unset, id .. ':error')
        else
          add(set, id .. ':error', note:sub(2))
        end
        if ending == 'retry' and (job.max_tries == '0' or tonumber(job.tries) < tonumber(job.max_tries)) then
          job.due, job.claim = text_of(now + tonumber(delay)), '-'
          make_due(id, job)
          write_row(id, job)
        else
          end_job(id, job, 'dead', 0)
        end
      end
    end
    if next(gone) then
      write_again()  -- it may be that the first attempt has ended them, and that this is taken for the answer to it
    end
    local may_be_had = ending == 'back' or ending == 'retry' or next(left_groups)
    write_all()
    if may_be_had and next(mine) then
      tell()
    end
    return table.concat(gone, ' ')
  end

  local function extend(at)
    local token, ttl, count = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
    local mine, gone = claimed_by(token, ids_said(at + 3, count))
    for id, job in pairs(mine) do
      job.expires = text_of(math.max(tonumber(job.expires), now + ttl))
      put_into(claimed, job.expires, id)
      write_row(id, job)
    end
    write_all()
    return table.concat({text_of(now + ttl), unpack(gone)}, ' ')
  end

  if kind == 'finish' then
    verb, size = finish, function(at) return 6 + ARGV[at + 5] end
  else
    verb, size = extend, function(at) return 3 + ARGV[at + 2] end
  end
end
