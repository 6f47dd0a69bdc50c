-- Evict rollouts for one reason: remove their payloads, and add one event to the log.
-- KEYS: 1 payloads, 2 log, 3 counters, 4 originals, 5 epoch, 6 gone, 7 gone_before, 8 run
-- ARGV: 1 epoch, 2 number of this eviction: larger than that of every eviction before it, 3 reason,
--       4 rollout ids (16 bytes each), 5 their positions (8 bytes each, little-endian),
--       6 request id of the last acceptance of a loss before they were planned, '' if none
-- Returns 'superseded' (also when a loss was accepted since then: the positions may belong to other rollouts), or the
-- number of rollouts.
-- At most a few thousand ids, so that the unpack below stays far from Lua's limit of some 8000 values.
if redis.call('GET', KEYS[5]) ~= ARGV[1] then return 'superseded' end
if (redis.call('HGET', KEYS[8], 'loss_accepted_by') or '') ~= ARGV[6] then return 'superseded' end
local num = #ARGV[4] / 16
-- a repeated call must not remove a rollout that was pushed again after the first one
if (tonumber(redis.call('HGET', KEYS[3], 'evicted_number') or '0') or 0) >= tonumber(ARGV[2]) then return num end
local IDS_REMEMBERED = 50000 -- twice as many at most
local ids, fields = {}, {}
for i = 1, num do
  ids[i] = string.sub(ARGV[4], i * 16 - 15, i * 16)
  fields[2 * i - 1], fields[2 * i] = ids[i], ''
end
-- Redis still deletes when it is out of memory, and has room for the event then: so deletion comes first
redis.call('HDEL', KEYS[1], unpack(ids))
redis.call('HDEL', KEYS[4], unpack(ids))
-- a push that is repeated after its rollouts were evicted must not store them a second time
if redis.call('HLEN', KEYS[6]) >= IDS_REMEMBERED then redis.call('RENAME', KEYS[6], KEYS[7]) end
redis.call('HSET', KEYS[6], unpack(fields))
local position = string.format('%.0f', tonumber(redis.call('HGET', KEYS[3], 'log_position') or '0') + 1)
redis.call('XADD', KEYS[2], position .. '-0', 'e', ARGV[5], 'w', ARGV[3])
redis.call('HSET', KEYS[3], 'log_position', position, 'evicted_number', ARGV[2])
redis.pcall('HINCRBY', KEYS[3], 'evicted:' .. ARGV[3], num) -- pcall: damaged counts must not end this half way
return num
