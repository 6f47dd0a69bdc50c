-- Ask the trainer to return to a checkpoint, with a line of the audit. A repeated call changes nothing, and neither does
-- another one for the same checkpoint while it waits.
-- KEYS: 1 run, 2 run_changes
-- ARGV: 1 request id, 2 version of the checkpoint, or '': there is none, 3 JSON of the request, 4 now_s,
--       5 JSON of the reason, 6 lineage and 7 checkpoints_kept of the run when the checkpoints were listed, or ''
-- Returns {'ok'}, {'state', state that forbids it}, {'changed'}: list the checkpoints again, {'waiting', version of the
-- one that waits} or {'none'}.
local MOST_BYTES = 8192 -- of request ids, newest first: at least 31 of them
local run = redis.call('HMGET', KEYS[1], 'rollback_by', 'rollback', 'state', 'lineage', 'step', 'checkpoints_kept')
local answered = run[1] or ''
if string.find('\n' .. answered .. '\n', '\n' .. ARGV[1] .. '\n', 1, true) then return {'ok'} end
local state = known_state(run[3])
local _, waiting = rollback_in(run[2])
if state ~= 'running' and state ~= 'paused' then return {'state', state} end
-- a trainer deletes what it does not keep: so nothing is asked for that it may have deleted since
if (run[4] or '') ~= ARGV[6] or (run[6] or '') ~= ARGV[7] then return {'changed'} end
if ARGV[2] == '' then return {'none'} end
if waiting and waiting ~= ARGV[2] then return {'waiting', waiting} end
redis.call('HSET', KEYS[1], 'rollback_by', string.sub(ARGV[1] .. '\n' .. answered, 1, MOST_BYTES))
if waiting then return {'ok'} end
redis.call('HSET', KEYS[1], 'rollback', ARGV[3])
redis.call('RPUSH', KEYS[2], '{"number":' .. redis.call('LLEN', KEYS[2]) + 1 .. ',"at_s":' .. ARGV[4]
  .. ',"command":"rollback","role":"operator","reason":' .. ARGV[5] .. ',"old":"' .. state .. '","new":"' .. state
  .. '","lineage":' .. count_in(run[4]) .. ',"step":' .. count_in(run[5]) .. ',"rollback":"' .. ARGV[2] .. '"}')
return {'ok'}
