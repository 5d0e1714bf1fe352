-- A name of which nothing is kept is a free lock, or will be one, and nobody waits for it.

local answer = alone(function()
  if redis.call('HLEN', KEYS[1]) > 0 then
    return nil
  end
  local since, until_then, token = granted(ARGV[4])
  if not token then
    return nil
  end
  redis.call('HSET', KEYS[1], 'claim_id', ARGV[3], 'holder', ARGV[5], 'fencing_token', token,
    'acquired_at', since, 'expires_at', until_then)
  if ARGV[6] ~= '' then
    redis.call('HSET', KEYS[1], 'info', ARGV[6])
  end
  return 'G ' .. token .. ' ' .. since
end)
if answer then
  return {answer}
end
