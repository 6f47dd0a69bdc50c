-- Prelude of the scripts that read or end visits, leases and evaluation units. A damaged value counts as absent, since
-- an error in the middle of a script would leave its work half done.
local function read(text, is_good)
  local is_json, value = pcall(cjson.decode, text)
  if is_json and type(value) == 'table' and is_good(value) then return value end
end

local function is_lease(value)
  return type(value.s) == 'string' and (value.k == 'eval' and type(value.u) == 'string'
    or value.k == 'train' and type(value.v) == 'string')
end

local function read_lease(lease_id)
  local text = redis.call('HGET', key('leases'), lease_id)
  return text and read(text, is_lease)
end

-- The fields of an evaluation that leases need; evaluations.py reads the rest.
local function is_eval(value)
  return type(value.state) == 'string' and type(value.deadline_s) == 'number' and type(value.version) == 'string'
end

local MOST_MISSING = 1000000
local function is_visit(value)
  local num = value.n
  return type(value.p) == 'string' and type(value.l) == 'string' and (value.h == nil or type(value.h) == 'table')
    and type(num) == 'number' and num == math.floor(num) and num >= 1 and num <= MOST_MISSING
end

-- A visit, or nil. A damaged one is dropped with all other damaged ones, and the rollouts in flight are counted again,
-- since nobody knows how many were theirs.
local function read_visit(visit_id)
  local visits = key('visits')
  local text = redis.call('HGET', visits, visit_id)
  if not text then return end
  local visit = read(text, is_visit)
  if visit then return visit end
  local inflight, every = 0, redis.call('HGETALL', visits)
  for i = 1, #every, 2 do
    local other = read(every[i + 1], is_visit)
    if not other then
      redis.call('HDEL', visits, every[i])
    elseif other.l ~= '' then
      inflight = inflight + other.n
    end
  end
  redis.call('HSET', key('counters'), 'inflight', inflight)
end

-- The subject of a damaged lease, found from the unit or visit that names the lease.
local function subject_of(lease_id)
  local unit = string.match(redis.call('HGET', key('eval_units'), lease_id) or '', '^(%S+)')
  if unit then return {k = 'eval', u = unit} end
  local every = redis.call('HGETALL', key('visits'))
  for i = 1, #every, 2 do
    local visit = read(every[i + 1], is_visit)
    if visit and visit.l == lease_id then return {k = 'train', v = every[i]} end
  end
end

-- End a lease. A visit with missing rollouts, or a unit without a result, waits to be leased again; but a visit that was
-- 'refused' ends, since nobody can sample it.
local function release(lease_id, why)
  local lease = read_lease(lease_id)
  redis.call('ZREM', key('lease_deadlines'), lease_id)
  if redis.call('HDEL', key('leases'), lease_id) == 0 then return end
  redis.pcall('HINCRBY', key('counters'), 'leases:' .. why, 1)
  lease = lease or subject_of(lease_id)
  if not lease then return end
  if lease.k == 'eval' then
    if redis.call('HEXISTS', key('eval_results'), lease.u) == 0 then redis.call('RPUSH', key('eval_todo'), lease.u) end
    return
  end
  local visit = read_visit(lease.v)
  if not visit or visit.l ~= lease_id then return end
  redis.call('HINCRBY', key('counters'), 'inflight', -visit.n)
  if why == 'refused' then
    redis.call('HDEL', key('visits'), lease.v)
  else
    visit.l = ''
    redis.call('HSET', key('visits'), lease.v, cjson.encode(visit))
    redis.call('RPUSH', key('returned'), lease.v)
  end
end
