-- A name that has so many permits already, of which none is taken, and for which nobody waits: see pools on its keys.

local answer = alone(function()
  local lease = KEYS[1]
  local head = redis.call('HMGET', lease, 'permits', 'last_slot')
  if head[1] ~= ARGV[10] or head[2] or redis.call('ZCARD', KEYS[2]) > 0
    or tonumber(ARGV[11]) > tonumber(ARGV[10]) then
    return nil
  end
  local since, until_then, token = granted(ARGV[5])
  if not token then
    return nil
  end
  local claim, take = ARGV[4], ARGV[11]
  redis.call('HSET', lease .. '1', 'claim_id', claim, 'holder', ARGV[6], 'fencing_token', token,
    'acquired_at', since, 'expires_at', until_then, 'take', take, 'info', ARGV[7])
  redis.call('HSET', lease, 'taken', take, 'last_slot', 1, 'claim:' .. claim, 1, 'token:' .. token, 1)
  redis.call('ZADD', lease .. ':slots', until_then, 1)
  redis.call('PERSIST', lease)
  return 'G ' .. token .. ' ' .. since .. ' 1'
end)
if answer then
  return {answer}
end
