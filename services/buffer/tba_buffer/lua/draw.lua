-- Record a drawn batch.
-- KEYS: 1 run, 2 counters, 3 open_batches, 4 batch:<id>, 5 batches_since_mark
-- ARGV: 1 token, 2 deadline_s, 3 record, 4 its lifetime in milliseconds, 5 member of open_batches, 6 rollouts,
--       then pairs of slot counter, count
-- Returns 'fenced', the state that forbids it, or 'ok'.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 'fenced' end
local state = redis.call('HGET', KEYS[1], 'state') or 'running'
if state ~= 'running' then return state end
if redis.call('ZSCORE', KEYS[3], ARGV[5]) then return 'ok' end
redis.call('SET', KEYS[4], ARGV[3], 'PX', ARGV[4])
redis.call('ZADD', KEYS[3], ARGV[2], ARGV[5])
redis.call('HINCRBY', KEYS[2], 'drawn', ARGV[6])
redis.call('HINCRBY', KEYS[2], 'batches', 1)
redis.call('SADD', KEYS[5], ARGV[5])
for i = 7, #ARGV, 2 do redis.call('HINCRBY', KEYS[2], 'slots:' .. ARGV[i], ARGV[i + 1]) end
return 'ok'
