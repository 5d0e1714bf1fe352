-- Carry out requests of one kind on one queue, each by itself.
--
-- ARGV, after what was said above: how many crashes make a job one that is claimed alone, and the error of one that is
-- found without tries; then the requests. Answers one a request, 'E error' where it failed.

local function each(verb, length_of)
  local answers, at = {}, 6
  while at <= #ARGV do
    local fine, answer = pcall(verb, at)
    if not fine then
      begin()
      answer = 'E ' .. (type(answer) == 'table' and answer.err or tostring(answer))
    end
    answers[#answers + 1] = answer
    at = at + length_of(at)
  end
  return answers
end

local kind = ARGV[1]
if kind == 'put' then
  return each(put, function(at) return 3 + 2 * ARGV[at + 2] end)
end
-- When Redis is out of memory it refuses a script's first write unless that needs no memory, and then no other. What is
-- there must be taken and ended all the same, so this is such a write, which changes nothing.
redis.call('PERSIST', jobs)
if kind == 'finish' then
  sweep()
  return each(finish, function(at) return 6 + ARGV[at + 5] end)
elseif kind == 'extend' then
  return each(extend, function(at) return 3 + ARGV[at + 2] end)
elseif kind == 'take' then
  if sweep() then
    return each(function() return 'A' end, function() return 5 end)
  end
  return each(take, function() return 5 end)
end
return ({cancel = cancel, revive = revive, forget = forget, look = look, depth = depth})[kind](6)
