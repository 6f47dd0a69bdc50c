-- Make a complete checkpoint the one that a resume starts from, and note which ones the trainer keeps: it deletes others
-- after this call.
-- KEYS: 1 run
-- ARGV: 1 token, 2 version, 3 key in the object store, 4 the versions that are kept, with spaces between, or '': as before
-- Returns {'fenced'}, {'rollback', JSON of the one that waits} or {'ok'}.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return {'fenced'} end
local rollback = redis.call('HGET', KEYS[1], 'rollback')
if rollback then return {'rollback', rollback} end
redis.call('HSET', KEYS[1], 'checkpoint', ARGV[2], 'checkpoint_key', ARGV[3])
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'checkpoints_kept', ARGV[4]) end
return {'ok'}
