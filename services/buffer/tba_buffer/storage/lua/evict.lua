-- Evict rollouts for one reason: remove their payloads, and add one event to the log.
-- args: number (of this eviction; every later eviction has a larger one), reason,
--       ids (of rollouts, 16 bytes each), positions (log positions of the rollouts, 8 bytes each, little-endian),
--       accepted_by (request id of the last loss accepted before the eviction was planned, '' if none)
-- Returns 'superseded' (also when a loss was accepted since the plan: the positions may belong to other rollouts), or
-- the number of rollouts.
-- At most a few thousand ids, so that the unpack below stays far from Lua's limit of some 8000 values.
local payloads, counters, gone = key('payloads'), key('counters'), key('gone')
if is_superseded() then return 'superseded' end
if (redis.call('HGET', key('run'), 'loss_accepted_by') or '') ~= args.accepted_by then return 'superseded' end
local num = #args.ids / 16
-- a repeated call must not remove a rollout that was pushed again after the first one
if (tonumber(redis.call('HGET', counters, 'evicted_number') or '0') or 0) >= args.number then return num end
local IDS_REMEMBERED = 50000 -- twice as many at most
local ids, fields = {}, {}
for i = 1, num do
  ids[i] = string.sub(args.ids, i * 16 - 15, i * 16)
  fields[2 * i - 1], fields[2 * i] = ids[i], ''
end
-- Redis still deletes when it is out of memory, and has room for the event then: so deletion comes first
redis.call('HDEL', payloads, unpack(ids))
redis.call('HDEL', key('originals'), unpack(ids))
-- a push that is repeated after its rollouts were evicted must not store them a second time
if redis.call('HLEN', gone) >= IDS_REMEMBERED then redis.call('RENAME', gone, key('gone_before')) end
redis.call('HSET', gone, unpack(fields))
append(next_position(), 'e', args.positions, 'w', args.reason)
redis.call('HSET', counters, 'evicted_number', digits(args.number))
redis.pcall('HINCRBY', counters, 'evicted:' .. args.reason, num) -- pcall: damaged counts must not end this half way
return num
