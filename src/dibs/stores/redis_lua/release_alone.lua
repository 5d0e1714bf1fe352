-- A single release of a lock, or of all the permits that anybody has, by the claim that holds them, and nobody waits: the
-- most frequent kind. What stands behind this (release, as a function) does the same for all kinds, and is not even made
-- then.

local row = nil  -- of the name, as release.lua reads it

-- The answer; nil when it is of another kind.
local function release_alone()
  local lease, claim = KEYS[1], ARGV[3]
  row = redis.call('HMGET', lease, 'claim_id', 'expires_at', 'permits', 'last_slot', 'taken')
  local held = row
  if row[3] then
    held = row[4] == '1' and redis.call('HMGET', lease .. '1', 'claim_id', 'expires_at') or {}
  end
  if held[1] ~= claim or tonumber(ARGV[4]) > 1 or redis.call('ZCARD', KEYS[2]) > 0 then
    return nil
  end
  local time = redis.call('TIME')
  local now = time[1] + time[2] / 1e6
  if tonumber(held[2]) <= now then
    return nil
  end
  if row[3] then
    redis.call('DEL', lease .. '1', lease, lease .. ':slots')
    redis.call('HSET', lease, 'permits', row[3], 'free_since', string.format('%.6f', now))
    redis.call('PEXPIRE', lease, ARGV[1])
  else
    redis.call('DEL', lease)
  end
  return '1'
end

if #KEYS == 3 and ARGV[5] == '' then
  local fine, answer = pcall(release_alone)
  if not fine then
    answer = 'E ' .. (type(answer) == 'table' and answer.err or tostring(answer))
  end
  if answer then
    return {answer}
  end
end
