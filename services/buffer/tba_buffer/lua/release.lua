-- Prelude of the scripts that end leases. KEYS as in lease.lua.
-- What a lease still owed goes back to be leased again: a visit with missing rollouts, a unit without a result.
-- 'refused': nobody can sample the visit, so it ends and is not leased again.
local function release(lease_id, why)
  local text = redis.call('HGET', KEYS[3], lease_id)
  redis.call('ZREM', KEYS[4], lease_id)
  if not text then return end
  redis.call('HDEL', KEYS[3], lease_id)
  redis.call('HINCRBY', KEYS[6], 'leases:' .. why, 1)
  local lease = cjson.decode(text)
  if lease.k == 'eval' then
    if redis.call('HEXISTS', KEYS[10], lease.u) == 0 then redis.call('RPUSH', KEYS[8], lease.u) end
    return
  end
  local visit_text = redis.call('HGET', KEYS[1], lease.v)
  if not visit_text then return end
  local visit = cjson.decode(visit_text)
  if visit.l ~= lease_id then return end
  redis.call('HINCRBY', KEYS[6], 'inflight', -visit.n)
  if why == 'refused' then
    redis.call('HDEL', KEYS[1], lease.v)
  else
    visit.l = ''
    redis.call('HSET', KEYS[1], lease.v, cjson.encode(visit))
    redis.call('RPUSH', KEYS[2], lease.v)
  end
end
