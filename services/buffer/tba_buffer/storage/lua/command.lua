-- Change the state of the run, and add a line to the audit. A pending rollback forbids `done`. A stop or a failure
-- withdraws the pending rollback, and the line names it.
-- args: state (the new one), reason, token, checks_token (whether the token must be the active one), now_s, command,
--       role, allowed_from (the states from which this change is allowed)
-- Returns {'ok', state}, {'fenced'}, {'refused', state that forbids it} or {'rollback', JSON of the pending rollback}.
if args.checks_token and redis.call('HGET', key('run'), 'token') ~= args.token then return {'fenced'} end
local run = redis.call('HMGET', key('run'), 'state', 'lineage', 'step', 'rollback')
local state = run[1] or 'running'
if state == args.state then return {'ok', state} end
if run[4] and args.state == 'done' then return {'rollback', run[4]} end
local withdraws = args.state == 'stopping' or args.state == 'failed'
local _, withdrawn = rollback_in(withdraws and run[4])
for _, allowed in ipairs(args.allowed_from) do
  if allowed == state then
    local more = withdrawn and ',"rollback":"' .. withdrawn .. '"' or ''
    local change = add_change(args.command, args.role, args.reason, state, args.state, run[2], run[3], more)
    if withdraws then redis.call('HDEL', key('run'), 'rollback') end
    redis.call('HSET', key('run'), 'state', args.state, 'reason', args.reason or '', 'change', change)
    return {'ok', args.state}
  end
end
return {'refused', state}
