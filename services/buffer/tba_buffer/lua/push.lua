-- One push, all or nothing: deduplicate, log, store, count, fulfil visits, evict.
-- KEYS: 1 payloads, 2 log, 3 counters, 4 marks, 5 visits, 6 leases, 7 lease_deadlines
-- ARGV: 1 max_rollouts, 2 number of items, 3 number of refusal codes,
--       then per item: rollout id, payload, packed record (log.py), visit id; then per code: code, count
-- Returns one number per item: 1 new, 0 duplicate, -1 the id is taken by other bytes.
local RECORD_BYTES, OFFSET_NUM_BYTES, OFFSET_STATUS = 45, 41, 45
local STATUS = {[0] = 'scored', [1] = 'pending', [2] = 'failed'}
local max_rollouts, num_items, num_codes = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])

local function whole(number) return string.format('%.0f', number) end
local function count(name, by) redis.call('HINCRBY', KEYS[3], name, whole(by)) end

local outcomes, new, seen, num_duplicate, num_conflict = {}, {}, {}, 0, 0
for i = 1, num_items do
  local at = 3 + (i - 1) * 4
  local rid, payload = ARGV[at + 1], ARGV[at + 2]
  local old = seen[rid] or redis.call('HGET', KEYS[1], rid)
  if not old then
    outcomes[i], seen[rid], new[#new + 1] = 1, payload, at
  elseif old == payload then
    outcomes[i], num_duplicate = 0, num_duplicate + 1
  else
    outcomes[i], num_conflict = -1, num_conflict + 1
  end
end

-- The log entry comes first: if Redis refuses to write, it refuses here, and nothing is half done.
local position = tonumber(redis.call('HGET', KEYS[3], 'log_position') or '0')
if #new > 0 then
  local records = {}
  for i, at in ipairs(new) do records[i] = ARGV[at + 3] end
  position = position + #new
  redis.call('XADD', KEYS[2], whole(position) .. '-0', 'r', table.concat(records))
  redis.call('HSET', KEYS[3], 'log_position', whole(position))
  local by_status, per_visit, payload_bytes = {scored = 0, pending = 0, failed = 0}, {}, 0
  for _, at in ipairs(new) do
    redis.call('HSET', KEYS[1], ARGV[at + 1], ARGV[at + 2])
    local status = STATUS[string.byte(ARGV[at + 3], OFFSET_STATUS)]
    by_status[status] = by_status[status] + 1
    payload_bytes = payload_bytes + #ARGV[at + 2]
    per_visit[ARGV[at + 4]] = (per_visit[ARGV[at + 4]] or 0) + 1
  end
  for status, number in pairs(by_status) do
    if number > 0 then count(status, number) end
  end
  count('live', #new)
  count('generated', #new)
  count('scored_total', by_status.scored)
  count('payload_bytes', payload_bytes)
  count('pushed:new', #new)
  for visit_id, number in pairs(per_visit) do
    local text = redis.call('HGET', KEYS[5], visit_id)
    if text then
      local visit = cjson.decode(text)
      if visit.l ~= '' then count('inflight', -math.min(number, visit.n)) end
      visit.n = visit.n - number
      if visit.n > 0 then
        redis.call('HSET', KEYS[5], visit_id, cjson.encode(visit))
      else
        redis.call('HDEL', KEYS[5], visit_id)
        if visit.l ~= '' then
          redis.call('HDEL', KEYS[6], visit.l)
          redis.call('ZREM', KEYS[7], visit.l)
        end
        count('leases:fulfilled', 1)
      end
    end
  end
end
if num_duplicate > 0 then count('pushed:duplicate', num_duplicate) end
local num_refused = num_conflict
if num_conflict > 0 then count('refused:conflict', num_conflict) end
for i = 1, num_codes do
  local at = 3 + num_items * 4 + (i - 1) * 2
  count('refused:' .. ARGV[at + 1], tonumber(ARGV[at + 2]))
  num_refused = num_refused + tonumber(ARGV[at + 2])
end
if num_refused > 0 then count('pushed:refused', num_refused) end

-- Evict the oldest. The event names the first position that survives, and repeats the marks, so that everything
-- before that position can be cut off the log and the index stays a function of what is left.
local excess = tonumber(redis.call('HGET', KEYS[3], 'live') or '0') - max_rollouts
if excess > 0 then
  local first_live, left, gone, gone_bytes = tonumber(redis.call('HGET', KEYS[3], 'first_live') or '1'), excess,
    {scored = 0, pending = 0, failed = 0}, 0
  while left > 0 do
    local entries = redis.call('XRANGE', KEYS[2], whole(first_live) .. '-0', '+', 'COUNT', 16)
    if #entries == 0 then break end
    for _, entry in ipairs(entries) do
      local last, records = tonumber(string.match(entry[1], '^(%d+)')), nil
      if entry[2][1] == 'r' then records = entry[2][2] end
      if records then
        local first = last - #records / RECORD_BYTES + 1
        while left > 0 and first_live <= last do
          local at = (math.max(first_live, first) - first) * RECORD_BYTES
          local record = string.sub(records, at + 1, at + RECORD_BYTES)
          redis.call('HDEL', KEYS[1], string.sub(record, 1, 16))
          local status = STATUS[string.byte(record, OFFSET_STATUS)]
          gone[status] = gone[status] + 1
          gone_bytes = gone_bytes + struct.unpack('<I4', record, OFFSET_NUM_BYTES)
          first_live, left = math.max(first_live, first) + 1, left - 1
        end
      else
        first_live = last + 1
      end
      if left == 0 then break end
    end
  end
  position = position + 1
  local marks = table.concat(redis.call('LRANGE', KEYS[4], 0, -1), ';')
  redis.call('XADD', KEYS[2], whole(position) .. '-0', 'e', whole(first_live) .. '|max_rollouts|' .. marks)
  redis.call('HSET', KEYS[3], 'log_position', whole(position), 'first_live', whole(first_live))
  redis.call('XTRIM', KEYS[2], 'MINID', whole(first_live) .. '-0')
  for status, number in pairs(gone) do
    if number > 0 then count(status, -number) end
  end
  count('live', left - excess)
  count('payload_bytes', -gone_bytes)
  count('evicted:max_rollouts', excess - left)
end
return outcomes
