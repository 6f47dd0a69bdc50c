-- Store an operator's request that the trainer returns to a checkpoint, and add a line to the audit. A repeated request
-- changes nothing. While a rollback is pending, another request for its checkpoint is answered 'ok' and adds no line.
-- args: request_id, version (of the checkpoint; absent: there is none), request (JSON), now_s, reason,
--       lineage and checkpoints_kept of the run when the checkpoints were listed ('' where there was none)
-- Returns {'ok'}, {'state', state that forbids it}, {'changed'}: list the checkpoints again, {'waiting', version of
-- another pending rollback} or {'none'}: there is no checkpoint.
local MOST_BYTES = 8192 -- of request ids, newest first: at least 31 of them
local run = redis.call('HMGET', key('run'), 'rollback_by', 'rollback', 'state', 'lineage', 'step', 'checkpoints_kept')
local answered = run[1] or ''
if string.find('\n' .. answered .. '\n', '\n' .. args.request_id .. '\n', 1, true) then return {'ok'} end
local state = known_state(run[3])
local _, waiting = rollback_in(run[2])
if state ~= 'running' and state ~= 'paused' then return {'state', state} end
-- a trainer deletes what it does not keep: so nothing is asked for that it may have deleted since
if (run[4] or '') ~= args.lineage or (run[6] or '') ~= args.checkpoints_kept then return {'changed'} end
if not args.version then return {'none'} end
if waiting and waiting ~= args.version then return {'waiting', waiting} end
redis.call('HSET', key('run'), 'rollback_by', string.sub(args.request_id .. '\n' .. answered, 1, MOST_BYTES))
if waiting then return {'ok'} end
redis.call('HSET', key('run'), 'rollback', args.request)
add_change('rollback', 'operator', args.reason, state, state, run[4], run[5], ',"rollback":"' .. args.version .. '"')
return {'ok'}
