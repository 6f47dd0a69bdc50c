-- Load one part of a snapshot, in the order of the saved log: rollouts, then publications. The first part makes the
-- snapshot the origin of this run, which must not have begun, and adopts its lineages.
-- args: origin (JSON; the same for every part), lineages (number as text -> JSON), last_lineage,
--       forked_from (version, absent if none), cursor (how far in the saved log this part reaches),
--       records (all packed records of log.py, one after the other; a record begins with the rollout id),
--       publications ("lineage step" of each version)
-- payloads: of the rollouts
-- Returns 'superseded', 'begun' (the run has begun, and not with this snapshot) or 'ok'.
-- A part has at most some hundred rollouts, so every unpack below stays far from Lua's limit of some 8000 values.
local RECORD_BYTES, ID_BYTES = 57, 16
local run, payloads = key('run'), key('payloads')
local num_rollouts, records = #ARGV - 1, args.records

if is_superseded() then return 'superseded' end
local position = next_position() - 1
local found = redis.call('HMGET', run, 'origin', 'origin_cursor', 'lineage')
if found[1] then
  if found[1] ~= args.origin then return 'begun' end
  if tonumber(found[2]) >= args.cursor then return 'ok' end
else
  if found[3] or position > 0 then return 'begun' end
  for lineage, document in pairs(args.lineages) do redis.call('HSET', key('lineages'), lineage, document) end
  redis.call('HSET', run, 'lineage', args.last_lineage, 'origin', args.origin)
  if args.forked_from then redis.call('HSET', run, 'forked_from', args.forked_from) end
end

local added, fields = {}, {}
if num_rollouts > 0 then
  local ids = {}
  for i = 1, num_rollouts do
    local at = (i - 1) * RECORD_BYTES
    ids[i] = string.sub(records, at + 1, at + ID_BYTES)
  end
  for i, stored in ipairs(redis.call('HMGET', payloads, unpack(ids))) do
    if not stored then
      added[#added + 1] = string.sub(records, (i - 1) * RECORD_BYTES + 1, i * RECORD_BYTES)
      fields[#fields + 1] = ids[i]
      fields[#fields + 1] = ARGV[i + 1]
    end
  end
end
if #added > 0 then
  position = position + #added
  append(position, 'r', table.concat(added))
  redis.call('HSET', payloads, unpack(fields))
  redis.call('HINCRBY', key('counters'), 'loaded', #added)
end
for _, version in ipairs(args.publications) do
  position = position + 1
  append(position, 'm', version)
end
redis.call('HSET', run, 'origin_cursor', digits(args.cursor))
return 'ok'
