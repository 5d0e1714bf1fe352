-- Let the lease of each claim last for its ttl from now, if it has not ended; never shorten it. Its end moves, if only by
-- the smallest step: who watches a lease sees that it was renewed.
--
-- KEYS: the lease of each request.  ARGV: its claim id, ttl (s) and slot.
-- Answers one text a request: when it now ends, '' when there is no such lease, or 'E error'.

local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6

local function renew(lease, claim, ttl, slot)
  local row = redis.call('HMGET', lease, 'claim_id', 'expires_at', 'permits', 'last_slot')
  local of_pool = row[3] and slot <= tonumber(row[4] or 0)
  if of_pool then
    row = redis.call('HMGET', lease .. slot, 'claim_id', 'expires_at')
  elseif slot > 1 then
    return ''
  end
  local expires_at = tonumber(row[2])
  if row[1] ~= claim or expires_at <= now then
    return ''
  end
  local until_then = string.format('%.6f', math.max(now + ttl, expires_at + 1e-6))
  if of_pool then
    extend_slot(lease, slot, until_then)
    return until_then
  end
  redis.call('PERSIST', lease)  -- as extend_slot does, and for the same reason
  redis.call('HSET', lease, 'expires_at', until_then)
  return until_then
end

local answers = {}
for key = 1, #KEYS do
  local fine, answer = pcall(renew, KEYS[key], ARGV[3 * key - 2], tonumber(ARGV[3 * key - 1]), tonumber(ARGV[3 * key]))
  if not fine then
    answer = 'E ' .. (type(answer) == 'table' and answer.err or tostring(answer))
  end
  answers[key] = answer
end
return answers
