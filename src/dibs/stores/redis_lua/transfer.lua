-- Put each claim in the place of the one that holds the lease, under the next token, if that one still does.
--
-- KEYS: the lease of each request, then the counter of tokens.
-- ARGV: the grace of the line (s), how long a forgotten line is kept (ms), then of each request its claim id, ttl (s),
--       holder, the claim that holds, info ('': none), slot, and '1' if the name has permits.
-- Answers one text a request: 'G token acquired_at slot', '' when there is no such lease, or 'E error'.

local function transfer(lease, claim, ttl, holder, from_claim, info, slot, has_permits)
  local head = redis.call('HMGET', lease, 'permits', 'last_slot')
  if (has_permits == '1') ~= (not not head[1]) or from_claim == '' then
    return ''
  end
  if slot > tonumber(head[1] and (head[2] or 0) or 1) then
    return ''
  end
  local key = head[1] and lease .. slot or lease
  local row = redis.call('HMGET', key, 'claim_id', 'expires_at', 'fencing_token', 'acquired_at')
  if not row[1] or tonumber(row[2]) <= now then
    return ''
  end
  local until_then = string.format('%.6f', now + ttl)
  if row[1] == claim then
    if now + ttl <= tonumber(row[2]) then
      until_then = row[2]  -- a repetition, however late, never shortens what a renewal gave
    end
    if head[1] then  -- it is written in any case: see grants.lua on WAIT
      extend_slot(lease, slot, until_then)
    else
      redis.call('HSET', lease, 'expires_at', until_then)
    end
    return string.format('G %s %s %d', row[3], row[4], slot)
  elseif row[1] ~= from_claim then
    return ''
  end
  local token = next_token()  -- under OOM it is this first write that Redis refuses; nothing has been changed then
  redis.call('HDEL', key, 'info')
  redis.call('HSET', key, 'claim_id', claim, 'holder', holder, 'fencing_token', token,
    'acquired_at', since, 'expires_at', until_then)
  if info ~= '' then
    redis.call('HSET', key, 'info', info)
  end
  if head[1] then
    pass_slot(lease, slot, {claim = from_claim, token = row[3]}, {claim = claim, token = token}, until_then)
  end
  return string.format('G %s %s %d', token, since, slot)
end

local answers = {}
local argument = 3
for key = 1, #KEYS - 1 do
  local claim, ttl, holder, from_claim, info, slot, has_permits = unpack(ARGV, argument, argument + 6)
  local fine, answer = pcall(transfer, KEYS[key],
    claim, tonumber(ttl), holder, from_claim, info, tonumber(slot), has_permits)
  if not fine then
    answer = 'E ' .. (type(answer) == 'table' and answer.err or tostring(answer))
  end
  answers[#answers + 1] = answer
  argument = argument + 7
end
return answers
