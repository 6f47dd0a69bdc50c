-- Store one push, all or nothing: deduplicate, log, store, count, fulfil visits.
-- args: records (all packed records of log.py, one after the other; a record begins with the rollout id),
--       visit_numbers (per item the index from 0 into visit_ids, 2 bytes, little-endian), visit_ids, searcher_ids (per
--       visit the searcher that claims it; a visit of two searchers is listed twice), refused (code -> number of
--       rollouts that were refused before this call)
-- payloads: of the rollouts
-- Returns 'superseded', or {version to sample with or '', state of the run, one character per item: 'n' new,
--          'd' duplicate, 'c' conflict: the id has other bytes, 'l' the visit was never leased to that searcher}.
-- A push has at most 512 items, so every unpack below stays far from Lua's limit of some 8000 values.
local RECORD_BYTES, ID_BYTES, NUM_TOKENS_AT, STATUS_AT, SCORED = 57, 16, 45, 57, 0
local FIELDS_PER_CALL = 16 -- id and payload of 8 rollouts: Redis copies them, and takes the same memory for each call
local payloads, counters = key('payloads'), key('counters')
local num_items, num_visits, records = #ARGV - 1, #args.visit_ids, args.records

-- an older process may have outdated prompts and lineages, and an emptied Redis has no epoch at all
if is_superseded() then return 'superseded' end

local function count(name, by)
  if by ~= 0 then redis.pcall('HINCRBY', counters, name, by) end -- pcall: a damaged count stops no push
end
local function tokens_of(i) return (struct.unpack('<I4', records, (i - 1) * RECORD_BYTES + NUM_TOKENS_AT)) end

local ids = {}
for i = 1, num_items do
  local at = (i - 1) * RECORD_BYTES
  ids[i] = string.sub(records, at + 1, at + ID_BYTES)
end
local stored, gone, gone_before = {}, {}, {}
if num_items > 0 then
  stored = redis.call('HMGET', payloads, unpack(ids))
  gone, gone_before = redis.call('HMGET', key('gone'), unpack(ids)), redis.call('HMGET', key('gone_before'), unpack(ids))
end

-- Only searchers that a visit was leased to may push for it. An unknown visit has ended or was never leased: a push for
-- it is stored, and fulfils nothing.
local function is_foreign(visit_id, searcher_id)
  local visit = read_visit(visit_id)
  if not visit then return false end
  for _, holder in ipairs(visit.h or {}) do
    if holder == searcher_id then return false end
  end
  return true
end
local foreign = {}
for number = 1, num_visits do foreign[number] = is_foreign(args.visit_ids[number], args.searcher_ids[number]) end
local function visit_of(i)
  local low, high = string.byte(args.visit_numbers, 2 * i - 1, 2 * i)
  return low + 256 * high + 1
end

local outcomes, new, fields, seen = {}, {}, {}, {}
local num_duplicate, num_conflict, num_foreign, num_scored = 0, 0, 0, 0
local new_tokens = 0
for i = 1, num_items do
  local id, payload = ids[i], ARGV[i + 1]
  local old = stored[i] or seen[id]
  if not old and (gone[i] or gone_before[i]) then -- stored once, and evicted since
    outcomes[i], num_duplicate = 'd', num_duplicate + 1
  elseif not old and foreign[visit_of(i)] then
    outcomes[i], num_foreign = 'l', num_foreign + 1
  elseif not old then
    seen[id], outcomes[i] = payload, 'n'
    new[#new + 1], new_tokens = i, new_tokens + tokens_of(i)
    fields[#fields + 1] = id
    fields[#fields + 1] = payload
    if string.byte(records, (i - 1) * RECORD_BYTES + STATUS_AT) == SCORED then num_scored = num_scored + 1 end
  -- re-scoring replaces the bytes: a late repeat is compared with what was pushed first
  elseif old == payload or redis.call('HGET', key('originals'), id) == redis.sha1hex(payload) then
    outcomes[i], num_duplicate = 'd', num_duplicate + 1
  else
    outcomes[i], num_conflict = 'c', num_conflict + 1
  end
end

local function fulfil(visit_id, number)
  local visit = read_visit(visit_id)
  if not visit then return end
  if visit.l ~= '' then count('inflight', -math.min(number, visit.n)) end
  visit.n = visit.n - number
  if visit.n > 0 then
    redis.call('HSET', key('visits'), visit_id, cjson.encode(visit))
    return
  end
  redis.call('HDEL', key('visits'), visit_id)
  if visit.l ~= '' then
    redis.call('HDEL', key('leases'), visit.l)
    redis.call('ZREM', key('lease_deadlines'), visit.l)
  end
  count('leases:fulfilled', 1)
end

-- the log entry comes first: if Redis refuses to write, it refuses here, and nothing is half done
if #new > 0 then
  local added, per_visit = records, {}
  if #new < num_items then
    added = {}
    for k, i in ipairs(new) do added[k] = string.sub(records, (i - 1) * RECORD_BYTES + 1, i * RECORD_BYTES) end
    added = table.concat(added)
  end
  append(next_position() + #new - 1, 'r', added)
  for at = 1, #fields, FIELDS_PER_CALL do
    redis.call('HSET', payloads, unpack(fields, at, math.min(at + FIELDS_PER_CALL - 1, #fields)))
  end
  count('generated', #new)
  count('tokens:generated', new_tokens)
  count('pushed:new', #new)
  count('scored_total', num_scored)
  for _, i in ipairs(new) do
    local number = visit_of(i)
    per_visit[number] = (per_visit[number] or 0) + 1
  end
  for number = 1, num_visits do
    if per_visit[number] then fulfil(args.visit_ids[number], per_visit[number]) end
  end
end

local num_refused = num_conflict + num_foreign
for code, number in pairs(args.refused) do
  count('refused:' .. code, number)
  num_refused = num_refused + number
end
count('refused:conflict', num_conflict)
count('refused:not-leased', num_foreign)
count('pushed:duplicate', num_duplicate)
count('pushed:refused', num_refused)
local run = redis.call('HMGET', key('run'), 'sampling_version', 'latest_version', 'state')
return {run[1] or run[2] or '', run[3] or 'running', table.concat(outcomes)}
