-- What people see of each lease in force.
--
-- KEYS: lease and line of each name.
-- Answers for each an empty list, or holder, token, acquired_at, expires_at, expires_in, info and how many wait.

local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local answers = {}
for key = 1, #KEYS, 2 do
  -- Of a key that is not ours it gives an error, which has none of these.
  local row = redis.pcall('HMGET', KEYS[key], 'claim_id', 'expires_at', 'holder', 'fencing_token', 'acquired_at', 'info')
  local answer = {}
  if row[1] and tonumber(row[2]) > now then
    local waiting = redis.call('ZCARD', KEYS[key + 1])
    answer = {row[3], row[4], row[5], row[2], string.format('%.6f', row[2] - now), row[6], waiting}
  end
  answers[#answers + 1] = answer
end
return answers
