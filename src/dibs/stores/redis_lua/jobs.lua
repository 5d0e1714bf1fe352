-- Carry out what was said, each request by itself.
--
-- ARGV, after what jobs_rows says: how many crashes make a job one that is claimed alone, and the error of one that is
-- found without tries; then the requests. Answers one a request, 'E error' where it failed.

local function each()
  local answers, at = {}, 6
  while at <= #ARGV do
    local fine, answer = pcall(verb, at)
    if not fine then
      begin()
      answer = 'E ' .. (type(answer) == 'table' and answer.err or tostring(answer))
    end
    answers[#answers + 1] = answer
    at = at + size(at)
  end
  return answers
end

if kind ~= 'put' then
  -- When Redis is out of memory it refuses a script's first write unless that needs no memory, and then no other. What is
  -- there must be taken and ended all the same, so this is such a write, which changes nothing.
  redis.call('PERSIST', jobs)
end
if mend then
  return mend(6)
end
if kind == 'take' or kind == 'finish' then
  local fine, more = pcall(sweep)
  if not fine then
    verb = function() error(more, 0) end  -- for each, and not for those on other queues in the same flight
  elseif more and kind == 'take' then
    verb = function() return 'A' end
  end
end
return each()
