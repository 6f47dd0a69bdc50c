-- A trainer starts: a new lineage and token. Open batches of the older lineages become void.
-- KEYS: 1 run, 2 lineages, 3 open_batches, 4 counters, 5 batches_since_mark
-- ARGV: 1 token, 2 JSON of the lineage, 3 lineage of the parent, 4 step of the parent
-- Returns {'unknown-parent'} or {'ok', lineage}.
if redis.call('HGET', KEYS[1], 'token') == ARGV[1] then return {'ok', tonumber(redis.call('HGET', KEYS[1], 'lineage'))} end
if ARGV[3] ~= '0' and redis.call('HEXISTS', KEYS[2], ARGV[3]) == 0 then return {'unknown-parent'} end
local lineage = redis.call('HINCRBY', KEYS[1], 'lineage', 1)
redis.call('HSET', KEYS[2], lineage, ARGV[2])
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'step', ARGV[4])
if redis.call('HGET', KEYS[1], 'state') ~= 'paused' then redis.call('HSET', KEYS[1], 'state', 'running', 'reason', '') end
for _, member in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
  redis.call('HINCRBY', KEYS[4], 'void', string.match(member, '^[^|]*|(%d+)|'))
  redis.call('SREM', KEYS[5], member)
end
redis.call('DEL', KEYS[3])
return {'ok', lineage}
