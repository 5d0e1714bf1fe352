-- What both kinds of grants need that are tried before everything else: see acquire_alone and acquire_permits_alone.
--
-- A single request for what is free and wanted by nobody else is the most frequent kind. What stands behind this (acquire
-- or acquire_permits, as a function) does the same for all kinds, and is not even made then.

-- The time of the grant, until when it lasts, and its token, which is written; nil where the counting needs more care.
local function granted(ttl)
  local time, counter = redis.call('TIME'), KEYS[#KEYS]
  local last_token = redis.call('GET', counter)
  if last_token and tonumber(last_token) >= time[1] * 1e6 + time[2] then
    return nil
  end
  local behind = string.format('%06d', time[2])
  local token = time[1] .. behind
  redis.call('SET', counter, token)  -- under OOM it is this first write that Redis refuses
  return time[1] .. '.' .. behind, string.format('%.6f', time[1] + time[2] / 1e6 + ttl), token
end

-- The answer to the request, by this function; nil when it is of another kind.
local function alone(grant)
  if #KEYS ~= 4 then
    return nil
  end
  local fine, answer = pcall(grant)
  return fine and answer or not fine and 'E ' .. (type(answer) == 'table' and answer.err or tostring(answer))
end
