-- Prelude of the scripts that end leases. KEYS as in lease.lua.

-- The subject of a damaged lease, found from the unit or visit that names the lease.
local function subject_of(lease_id)
  local unit = string.match(redis.call('HGET', KEYS[9], lease_id) or '', '^(%S+)')
  if unit then return {k = 'eval', u = unit} end
  local every = redis.call('HGETALL', KEYS[1])
  for i = 1, #every, 2 do
    local visit = read(KEYS[15], 'visit', every[i], every[i + 1], is_visit)
    if visit and visit.l == lease_id then return {k = 'train', v = every[i]} end
  end
end

-- End a lease. A visit with missing rollouts, or a unit without a result, waits to be leased again; but a visit that was
-- 'refused' ends, since nobody can sample it.
local function release(lease_id, why)
  local text = redis.call('HGET', KEYS[3], lease_id)
  redis.call('ZREM', KEYS[4], lease_id)
  if not text then return end
  redis.call('HDEL', KEYS[3], lease_id)
  redis.pcall('HINCRBY', KEYS[6], 'leases:' .. why, 1)
  local lease = read_lease(KEYS[15], lease_id, text) or subject_of(lease_id)
  if not lease then return end
  if lease.k == 'eval' then
    if redis.call('HEXISTS', KEYS[10], lease.u) == 0 then redis.call('RPUSH', KEYS[8], lease.u) end
    return
  end
  local visit = read_visit(KEYS[1], KEYS[6], KEYS[15], lease.v)
  if not visit or visit.l ~= lease_id then return end
  redis.call('HINCRBY', KEYS[6], 'inflight', -visit.n)
  if why == 'refused' then
    redis.call('HDEL', KEYS[1], lease.v)
  else
    visit.l = ''
    redis.call('HSET', KEYS[1], lease.v, cjson.encode(visit))
    redis.call('RPUSH', KEYS[2], lease.v)
  end
end
