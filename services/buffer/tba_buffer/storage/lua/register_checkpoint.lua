-- Make a complete checkpoint the one that a resume starts from, and note which ones the trainer keeps: it deletes others
-- after this call.
-- args: token, version, key (in the object store), kept (the versions that are kept, with spaces between; '': as before)
-- Returns {'fenced'}, {'rollback', JSON of the one that waits} or {'ok'}.
local run = key('run')
if redis.call('HGET', run, 'token') ~= args.token then return {'fenced'} end
local rollback = redis.call('HGET', run, 'rollback')
if rollback then return {'rollback', rollback} end
redis.call('HSET', run, 'checkpoint', args.version, 'checkpoint_key', args.key)
if args.kept ~= '' then redis.call('HSET', run, 'checkpoints_kept', args.kept) end
return {'ok'}
