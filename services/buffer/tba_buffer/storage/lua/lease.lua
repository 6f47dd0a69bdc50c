-- Lease evaluation units and visits, after releasing expired leases. If any of `lease_ids` is an open lease already,
-- the request is a repeat: only those leases are returned, with a new deadline, and no other is granted or released.
-- args: now_s, deadline_s (of new leases), searcher_id, rollouts_per_visit, lease_ids (for new leases),
--       max_train (leases), room (most rollouts of train leases; absent: any number), cursor (as the caller saw it),
--       candidates (visit id, prompt id, cursor after it, ...),
--       refused_versions (that the searcher cannot use: their evaluation units are left to others)
-- Returns {1 if the cursor is not the one that the caller saw, else 0; then per lease: 'train', lease id, visit id,
--          prompt id, rollouts; or: 'eval', lease id, unit, '', 0}.
local visits, leases, deadlines = key('visits'), key('leases'), key('lease_deadlines')
local todo, counters = key('eval_todo'), key('counters')
local max_leases, room = #args.lease_ids, args.room or math.huge
local reply, num_leases, num_train = {0}, 0, 0

local function answer(kind, lease_id, subject, prompt_id, num_rollouts)
  for _, value in ipairs({kind, lease_id, subject, prompt_id, num_rollouts}) do reply[#reply + 1] = value end
end

for _, lease_id in ipairs(args.lease_ids) do
  local text = redis.call('HGET', leases, lease_id)
  if text then
    local lease = read(text, is_lease)
    local visit = lease and lease.k == 'train' and read_visit(lease.v)
    if visit then
      answer('train', lease_id, lease.v, visit.p, visit.n)
    elseif lease and lease.k == 'eval' then
      answer('eval', lease_id, lease.u, '', 0)
    else
      release(lease_id, 'expired')
    end
    if redis.call('HEXISTS', leases, lease_id) == 1 then redis.call('ZADD', deadlines, args.deadline_s, lease_id) end
  end
end
if #reply > 1 then return reply end

local function open(lease_id, lease)
  redis.call('HSET', leases, lease_id, cjson.encode(lease))
  redis.call('ZADD', deadlines, args.deadline_s, lease_id)
  redis.pcall('HINCRBY', counters, 'leases:granted', 1)
end

local MOST_PER_CALL = 1000
-- a deadline beyond that of new leases was set before the clock went back: it becomes that of a new lease
local latest = string.format('(%.17g', args.deadline_s)
for _, lease_id in ipairs(redis.call('ZRANGEBYSCORE', deadlines, latest, '+inf', 'LIMIT', 0, MOST_PER_CALL)) do
  redis.call('ZADD', deadlines, args.deadline_s, lease_id)
end

for _, lease_id in ipairs(redis.call('ZRANGEBYSCORE', deadlines, '-inf', args.now_s)) do
  release(lease_id, 'expired')
end

local cannot_use, evals, num_skipped = {}, {}, 0
for _, version in ipairs(args.refused_versions) do cannot_use[version] = true end

local function pending_eval(eval_id)
  if evals[eval_id] == nil then
    local text = redis.call('HGET', key('evals'), eval_id)
    local eval = text and read(text, is_eval)
    evals[eval_id] = eval and eval.state == 'pending' and eval.deadline_s > args.now_s and eval or false
  end
  return evals[eval_id]
end

while num_leases < max_leases do
  local unit = redis.call('LINDEX', todo, num_skipped)
  if not unit then break end
  local eval_id, kind = string.match(unit, '^([^|]+)|(%a+)|%d+$')
  local is_unit = kind == 'sample' or kind == 'greedy'
  local eval = is_unit and pending_eval(eval_id)
  if eval and cannot_use[eval.version] then
    num_skipped = num_skipped + 1
  else
    redis.call('LREM', todo, 1, unit)
    if eval and redis.call('HEXISTS', key('eval_results'), unit) == 0 then
      num_leases = num_leases + 1
      local lease_id = args.lease_ids[num_leases]
      open(lease_id, {k = 'eval', s = args.searcher_id, u = unit})
      redis.call('HSET', key('eval_units'), lease_id, unit .. ' ' .. args.searcher_id)
      answer('eval', lease_id, unit, '', 0)
    end
  end
end

local MOST_HOLDERS = 32 -- so many searchers may still push what they sampled of a visit; beyond that the oldest may not
local function grant(visit_id, visit)
  num_leases, num_train = num_leases + 1, num_train + 1
  local lease_id = args.lease_ids[num_leases]
  visit.l, visit.h = lease_id, visit.h or {}
  for i = #visit.h, 1, -1 do
    if visit.h[i] == args.searcher_id then table.remove(visit.h, i) end
  end
  visit.h[#visit.h + 1] = args.searcher_id
  if #visit.h > MOST_HOLDERS then table.remove(visit.h, 1) end
  redis.call('HSET', visits, visit_id, cjson.encode(visit))
  redis.call('HINCRBY', counters, 'inflight', visit.n)
  open(lease_id, {k = 'train', s = args.searcher_id, v = visit_id})
  room = math.max(0, room - visit.n)
  answer('train', lease_id, visit_id, visit.p, visit.n)
end

local function may_grant() return num_leases < max_leases and num_train < args.max_train and room ~= 0 end

while may_grant() do
  local visit_id = redis.call('LPOP', key('returned'))
  if not visit_id then break end
  local visit = read_visit(visit_id)
  if visit then grant(visit_id, visit) end
end

if may_grant() and #args.candidates > 0 then
  if (redis.call('GET', key('cursor')) or '') ~= args.cursor then
    reply[1] = 1
  else
    local cursor
    for at = 1, #args.candidates, 3 do
      if not may_grant() then break end
      grant(args.candidates[at], {p = args.candidates[at + 1], n = args.rollouts_per_visit})
      cursor = args.candidates[at + 2]
    end
    redis.call('SET', key('cursor'), cursor)
  end
end
return reply
