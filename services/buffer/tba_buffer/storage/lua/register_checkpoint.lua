-- Make a complete checkpoint the one that a resume starts from.
-- KEYS: 1 run
-- ARGV: 1 token, 2 version, 3 key in the object store
-- Returns {'fenced'}, {'rollback', JSON of the one that waits} or {'ok'}.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return {'fenced'} end
local rollback = redis.call('HGET', KEYS[1], 'rollback')
if rollback then return {'rollback', rollback} end
redis.call('HSET', KEYS[1], 'checkpoint', ARGV[2], 'checkpoint_key', ARGV[3])
return {'ok'}
