-- Load one part of a snapshot, in the order of the saved log: rollouts, then publications. The first part makes the
-- snapshot the origin of this run, which must not have begun, and adopts its lineages.
-- KEYS: 1 run, 2 lineages, 3 payloads, 4 log, 5 counters, 6 epoch
-- ARGV: 1 epoch, 2 origin (JSON; the same for every part), 3 JSON map of the lineages, 4 the last of them,
--       5 version that the run is forked from, or '', 6 how far in the saved log this part reaches,
--       7 number of rollouts N, 8 all packed records (log.py), one after the other; a record begins with the rollout id,
--       then N payloads, then per publication: "lineage step" of its version
-- Returns 'superseded', 'begun' (the run has begun, and not with this snapshot) or 'ok'.
-- A part has at most some hundred rollouts, so every unpack below stays far from Lua's limit of some 8000 values.
local RECORD_BYTES, ID_BYTES, FIRST = 57, 16, 9
local num_rollouts, records = tonumber(ARGV[7]), ARGV[8]

local function digits(number) return string.format('%.0f', number) end

if redis.call('GET', KEYS[6]) ~= ARGV[1] then return 'superseded' end
local position = tonumber(redis.call('HGET', KEYS[5], 'log_position') or '0')
local found = redis.call('HMGET', KEYS[1], 'origin', 'origin_cursor', 'lineage')
if found[1] then
  if found[1] ~= ARGV[2] then return 'begun' end
  if tonumber(found[2]) >= tonumber(ARGV[6]) then return 'ok' end
else
  if found[3] or position > 0 then return 'begun' end
  for lineage, document in pairs(cjson.decode(ARGV[3])) do redis.call('HSET', KEYS[2], lineage, document) end
  redis.call('HSET', KEYS[1], 'lineage', ARGV[4], 'origin', ARGV[2])
  if ARGV[5] ~= '' then redis.call('HSET', KEYS[1], 'forked_from', ARGV[5]) end
end

local added, fields = {}, {}
if num_rollouts > 0 then
  local ids = {}
  for i = 1, num_rollouts do
    local at = (i - 1) * RECORD_BYTES
    ids[i] = string.sub(records, at + 1, at + ID_BYTES)
  end
  for i, stored in ipairs(redis.call('HMGET', KEYS[3], unpack(ids))) do
    if not stored then
      added[#added + 1] = string.sub(records, (i - 1) * RECORD_BYTES + 1, i * RECORD_BYTES)
      fields[#fields + 1] = ids[i]
      fields[#fields + 1] = ARGV[FIRST + i - 1]
    end
  end
end
if #added > 0 then
  position = position + #added
  redis.call('XADD', KEYS[4], digits(position) .. '-0', 'r', table.concat(added))
  redis.call('HSET', KEYS[3], unpack(fields))
  redis.call('HINCRBY', KEYS[5], 'loaded', #added)
end
for at = FIRST + num_rollouts, #ARGV do
  position = position + 1
  redis.call('XADD', KEYS[4], digits(position) .. '-0', 'm', ARGV[at])
end
redis.call('HSET', KEYS[5], 'log_position', digits(position))
redis.call('HSET', KEYS[1], 'origin_cursor', ARGV[6])
return 'ok'
