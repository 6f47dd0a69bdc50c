-- Start a trainer: a new lineage and token, and a line of the ledger that says where it continues. Open batches of
-- older lineages become void. A repeated request id changes nothing, however late it comes, and gets the lineage and
-- token that it took. If the registered checkpoint has a later step than the parent, the parent's checkpoint replaces
-- it, or it is removed. A pending rollback ends with the start that obeys it, or with any start whose parent is at most
-- its step. So the checkpoint of a pending rollback is always in the history of the active lineage.
-- args: token, request_id, now_s, parent_lineage, parent_step, document (JSON of the lineage),
--       line (JSON, of the ledger; "LINEAGE" in place of the new number), history (of the parent: "lineage-step ..."),
--       checkpoint_key (of the parent; absent: none), is_rollback, obeys (id of the request for a rollback; absent:
--       none), in_process (the same process trained the lineage before, so a stop or a failure that came meanwhile
--       stays), fails (why the run fails in this call; absent: it does not)
-- Returns 'superseded', {'withdrawn'}: the rollback to obey is no longer pending; {'unknown-lineage'}, {'unknown-step'}
-- or {'ok', lineage, token}.
-- A valid parent is the starting model, the start of its lineage, the result of an acked step, or an announced,
-- checkpointed or adopted version.
local run, counters = key('run'), key('counters')
if is_superseded() then return 'superseded' end
local taken = redis.call('HGET', key('lineage_requests'), args.request_id)
if taken then
  local number, token = string.match(taken, '^(%d+) (.+)$')
  return {'ok', tonumber(number), token}
end
local request_id, asked_for = rollback_in(redis.call('HGET', run, 'rollback'))
if args.obeys and request_id ~= args.obeys then return {'withdrawn'} end
local parent_lineage, parent_step = digits(args.parent_lineage), digits(args.parent_step)
local parent = parent_lineage .. '-' .. parent_step
if parent ~= '0-0' then
  local text = redis.call('HGET', key('lineages'), parent_lineage)
  local is_read, lineage = pcall(cjson.decode, text or 'null') -- the start of a damaged one is unknown
  local start = is_read and type(lineage) == 'table' and string.match(tostring(lineage.parent), '%-(%d+)$')
  local known = redis.call('HMGET', run, 'checkpoint', 'forked_from')
  if not text and known[2] ~= parent then return {'unknown-lineage'} end
  if start ~= parent_step and known[1] ~= parent and known[2] ~= parent
      and redis.call('HEXISTS', key('ledger_steps'), parent) == 0
      and redis.call('HEXISTS', key('announced'), parent) == 0 then
    return {'unknown-step'}
  end
end
-- draws that are not in the history give back what they took
if redis.call('HEXISTS', counters, 'draw_position') == 1 then append(next_position(), 'l', args.history) end
local lineage = digits(redis.call('HINCRBY', run, 'lineage', 1))
redis.call('HSET', key('lineages'), lineage, args.document)
redis.call('RPUSH', key('ledger'), (string.gsub(args.line, '"LINEAGE"', lineage, 1)))
redis.call('HSET', key('lineage_requests'), args.request_id, lineage .. ' ' .. args.token)
redis.call('HSET', run, 'token', args.token, 'step', parent_step,
  'lineage_position', redis.call('HGET', counters, 'log_position') or '0')
local registered = redis.call('HGET', run, 'checkpoint')
local registered_step = registered and tonumber(string.match(registered, '%-(%d+)$') or '')
if registered and (registered_step or math.huge) > args.parent_step then -- nobody can resume from a damaged one
  if args.checkpoint_key then
    redis.call('HSET', run, 'checkpoint', parent, 'checkpoint_key', args.checkpoint_key)
  else
    redis.call('HDEL', run, 'checkpoint', 'checkpoint_key')
  end
end
if args.is_rollback then redis.pcall('HINCRBY', run, 'rollbacks', 1) end
local state = redis.call('HGET', run, 'state') or 'running'
local stays = not args.fails and (state == 'paused' or args.in_process and (state == 'stopping' or state == 'failed'))
local new = args.fails and 'failed' or stays and state or 'running'
if not stays then redis.call('HSET', run, 'state', new, 'reason', args.fails or '') end
local obeys = request_id and request_id == args.obeys
local back_to = (obeys or asked_for and args.parent_step <= tonumber(string.match(asked_for, '%d+$'))) and asked_for
if back_to then redis.call('HDEL', run, 'rollback') end
if new ~= state or back_to then
  local why = args.fails
  if back_to and back_to ~= parent and not args.fails then
    why = obeys and 'the checkpoint that was asked for is gone or damaged'
      or 'an alarm, or a start of the trainer, went back further'
  end
  local more = back_to and ',"rollback":"' .. back_to .. '"' or ''
  local change = add_change(args.fails and 'fail' or 'lineage', 'trainer', why, state, new, lineage, parent_step, more)
  if new ~= state then redis.call('HSET', run, 'change', change) end
end
local num_rollouts = 0
for _, member in ipairs(redis.call('ZRANGE', key('open_batches'), 0, -1)) do
  num_rollouts = num_rollouts + (tonumber(string.match(member, '^[^|]*|(%d+)|') or '') or 0)
  redis.call('SREM', key('batches_since_mark'), member)
end
if num_rollouts > 0 then redis.pcall('HINCRBY', counters, 'void', num_rollouts) end
redis.call('DEL', key('open_batches'), key('open_steps'))
return {'ok', tonumber(lineage), args.token}
