-- Change the desired number of searchers: the next revision, and a line of the audit. A request id that made a change
-- before changes nothing.
-- KEYS: 1 run, 2 scaling, 3 scaling_changes, 4 scaling_requests, 5 epoch
-- ARGV: 1 request id, 2 epoch, 3 now_s, 4 desired number ('null': as the recipe or the chart says), 5 JSON of the reason
-- Returns 'superseded' or {'ok', revision}.
if redis.call('GET', KEYS[5]) ~= ARGV[2] then return 'superseded' end
local known = redis.call('HGET', KEYS[4], ARGV[1])
if known then return {'ok', tonumber(known)} end
local run = redis.call('HMGET', KEYS[1], 'lineage', 'step')
local revision = redis.call('HINCRBY', KEYS[2], 'revision', 1)
local old = redis.call('HGET', KEYS[2], 'wanted') or 'null'
if ARGV[4] == 'null' then
  redis.call('HDEL', KEYS[2], 'wanted')
else
  redis.call('HSET', KEYS[2], 'wanted', ARGV[4])
end
redis.call('RPUSH', KEYS[3], '{"revision":' .. revision .. ',"at_s":' .. ARGV[3] .. ',"role":"operator","reason":'
  .. ARGV[5] .. ',"lineage":' .. (run[1] or '0') .. ',"step":' .. (run[2] or '0') .. ',"old":' .. old
  .. ',"new":' .. ARGV[4] .. '}')
redis.call('HSET', KEYS[4], ARGV[1], revision)
return {'ok', revision}
