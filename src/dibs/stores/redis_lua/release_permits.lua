-- The release of permits: what `release` (release.lua) calls for a name that has some, made when it meets the first one.

local now, row_keep, grace, keep_row = ...

local function release_permits(lease, line, waiters, claim, slot, left, keep, info, permits, last_slot, taken)
  if slot == 0 then
    slot = tonumber(redis.call('HGET', lease, 'claim:' .. claim) or 0)
  end
  local row = slot > 0 and slot <= last_slot
    and redis.call('HMGET', lease .. slot, 'claim_id', 'expires_at', 'fencing_token', 'take')
  local held = row and row[1] == claim and tonumber(row[2]) > now
  if held and keep > 0 then
    keep_row(lease .. slot, keep, info)
    disown_slot(lease, claim)
    extend_slot(lease, slot, string.format('%.6f', now + keep))
  elseif held then
    local one = {slot = slot, claim = claim, token = row[3], take = tonumber(row[4])}
    end_slots(now, lease, {one}, permits, taken, row_keep)
  end
  if left or (held and keep <= 0) then
    tell_next(now, lease, line, waiters, grace)
  end
  return held and '1' or '0'
end

return release_permits
