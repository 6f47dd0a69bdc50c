-- Lease evaluation units and visits; expired leases are released first. If some of the ids for new leases are open
-- leases, the request is a repeat: it is answered with those, with a new deadline, and nothing else is granted.
-- KEYS: 1 visits, 2 returned, 3 leases, 4 lease_deadlines, 5 cursor, 6 counters, 7 evals, 8 eval_todo,
--       9 eval_units, 10 eval_results
-- ARGV: 1 now_s, 2 deadline_s of new leases, 3 searcher id, 4 rollouts per visit, 5 most leases, 6 most train leases,
--       7 most rollouts of train leases (-1: any), 8 the cursor as the caller saw it, 9 number of candidates,
--       then the ids for new leases, then per candidate: visit id, prompt id, cursor after it,
--       then the versions that the searcher cannot use (their evaluation units are left to others)
-- Returns {1 if the cursor has moved meanwhile, then per lease: 'train', lease id, visit id, prompt id, rollouts
--          or: 'eval', lease id, unit, '', 0}.
local now, max_leases, max_train = tonumber(ARGV[1]), tonumber(ARGV[5]), tonumber(ARGV[6])
local room, num_candidates = tonumber(ARGV[7]), tonumber(ARGV[9])
local FIRST_ID = 10
local reply, num_leases, num_train = {0}, 0, 0

local function answer(kind, lease_id, subject, prompt_id, num_rollouts)
  for _, value in ipairs({kind, lease_id, subject, prompt_id, num_rollouts}) do reply[#reply + 1] = value end
end

local known = redis.call('HMGET', KEYS[3], unpack(ARGV, FIRST_ID, FIRST_ID + max_leases - 1))
for i = 1, max_leases do
  if known[i] then
    local lease_id = ARGV[FIRST_ID + i - 1]
    local lease = read_lease(known[i])
    local visit = lease and lease.k == 'train' and read_visit(KEYS[1], KEYS[6], lease.v)
    if visit then
      answer('train', lease_id, lease.v, visit.p, visit.n)
    elseif lease and lease.k == 'eval' then
      answer('eval', lease_id, lease.u, '', 0)
    else
      release(lease_id, 'expired')
    end
    if redis.call('HEXISTS', KEYS[3], lease_id) == 1 then redis.call('ZADD', KEYS[4], ARGV[2], lease_id) end
  end
end
if #reply > 1 then return reply end

local function open(lease_id, lease)
  redis.call('HSET', KEYS[3], lease_id, cjson.encode(lease))
  redis.call('ZADD', KEYS[4], ARGV[2], lease_id)
  redis.pcall('HINCRBY', KEYS[6], 'leases:granted', 1)
end

local MOST_PER_CALL = 1000
-- a deadline beyond that of new leases was set before the clock went back: it becomes that of a new lease
for _, lease_id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '(' .. ARGV[2], '+inf', 'LIMIT', 0, MOST_PER_CALL)) do
  redis.call('ZADD', KEYS[4], ARGV[2], lease_id)
end

for _, lease_id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', ARGV[1])) do
  release(lease_id, 'expired')
end

local cannot_use, evals, num_skipped = {}, {}, 0
for i = FIRST_ID + max_leases + num_candidates * 3, #ARGV do cannot_use[ARGV[i]] = true end

local function pending_eval(eval_id)
  if evals[eval_id] == nil then
    local text = redis.call('HGET', KEYS[7], eval_id)
    local eval = text and read(text, is_eval)
    evals[eval_id] = eval and eval.state == 'pending' and eval.deadline_s > now and eval or false
  end
  return evals[eval_id]
end

while num_leases < max_leases do
  local unit = redis.call('LINDEX', KEYS[8], num_skipped)
  if not unit then break end
  local eval_id, kind = string.match(unit, '^([^|]+)|(%a+)|%d+$')
  local is_unit = kind == 'sample' or kind == 'greedy'
  local eval = is_unit and pending_eval(eval_id)
  if eval and cannot_use[eval.version] then
    num_skipped = num_skipped + 1
  else
    redis.call('LREM', KEYS[8], 1, unit)
    if eval and redis.call('HEXISTS', KEYS[10], unit) == 0 then
      local lease_id = ARGV[FIRST_ID + num_leases]
      num_leases = num_leases + 1
      open(lease_id, {k = 'eval', s = ARGV[3], u = unit})
      redis.call('HSET', KEYS[9], lease_id, unit .. ' ' .. ARGV[3])
      answer('eval', lease_id, unit, '', 0)
    end
  end
end

local MOST_HOLDERS = 32 -- so many searchers may still push what they sampled of a visit; beyond that the oldest may not
local function grant(visit_id, visit)
  local lease_id = ARGV[FIRST_ID + num_leases]
  num_leases, num_train = num_leases + 1, num_train + 1
  visit.l, visit.h = lease_id, visit.h or {}
  for i = #visit.h, 1, -1 do
    if visit.h[i] == ARGV[3] then table.remove(visit.h, i) end
  end
  visit.h[#visit.h + 1] = ARGV[3]
  if #visit.h > MOST_HOLDERS then table.remove(visit.h, 1) end
  redis.call('HSET', KEYS[1], visit_id, cjson.encode(visit))
  redis.call('HINCRBY', KEYS[6], 'inflight', visit.n)
  open(lease_id, {k = 'train', s = ARGV[3], v = visit_id})
  if room >= 0 then room = math.max(0, room - visit.n) end
  answer('train', lease_id, visit_id, visit.p, visit.n)
end

local function may_grant() return num_leases < max_leases and num_train < max_train and room ~= 0 end

while may_grant() do
  local visit_id = redis.call('LPOP', KEYS[2])
  if not visit_id then break end
  local visit = read_visit(KEYS[1], KEYS[6], visit_id)
  if visit then grant(visit_id, visit) end
end

if may_grant() and num_candidates > 0 then
  if (redis.call('GET', KEYS[5]) or '') ~= ARGV[8] then
    reply[1] = 1
  else
    local cursor
    for i = 1, num_candidates do
      if not may_grant() then break end
      local at = FIRST_ID + max_leases + (i - 1) * 3
      grant(ARGV[at], {p = ARGV[at + 1], n = tonumber(ARGV[4])})
      cursor = ARGV[at + 2]
    end
    if cursor then redis.call('SET', KEYS[5], cursor) end
  end
end
return reply
