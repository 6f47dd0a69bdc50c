-- Register a complete checkpoint as the one that a resume starts from, and store which checkpoints the trainer keeps.
-- The trainer deletes the others after this call.
-- args: token, version, key (in the object store), kept (versions of the kept checkpoints, separated by spaces; '': the
--       stored list stays)
-- Returns {'ok'}, {'fenced'} or {'rollback', JSON of the pending rollback}.
local run = key('run')
if redis.call('HGET', run, 'token') ~= args.token then return {'fenced'} end
local rollback = redis.call('HGET', run, 'rollback')
if rollback then return {'rollback', rollback} end
redis.call('HSET', run, 'checkpoint', args.version, 'checkpoint_key', args.key)
if args.kept ~= '' then redis.call('HSET', run, 'checkpoints_kept', args.kept) end
return {'ok'}
