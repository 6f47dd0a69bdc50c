-- Note in the ledger that step (lineage, step) consumed a batch. Steps of a lineage are acked in order, once each.
-- args: token, lineage, step, batch_id, now_s, member (of open_batches), line (JSON, of the ledger),
--       num_trained (rollouts), trained (msgpack record of rollouts/trained_steps.py, or ''),
--       num_kept (how many of these records are kept), ages (policy age -> rollouts),
--       counts (counter -> how much it grows)
-- Returns {'ok'}, {'fenced'}: another trainer is active; {'other', id of the batch that this step consumed},
-- {'rollback', JSON of the pending rollback}, {'void'}: the batch is past its deadline; or {'order', last acked step}.
local run, counters = key('run'), key('counters')
local lineage, step = digits(args.lineage), digits(args.step)
if redis.call('HGET', run, 'token') ~= args.token or redis.call('HGET', run, 'lineage') ~= lineage then
  return {'fenced'}
end
local name = lineage .. '-' .. step
local acked = redis.call('HGET', key('ledger_steps'), name)
if acked == args.batch_id then return {'ok'} end
if acked then return {'other', acked} end
local rollback = redis.call('HGET', run, 'rollback')
if rollback then return {'rollback', rollback} end
local deadline = redis.call('ZSCORE', key('open_batches'), args.member)
if not deadline or tonumber(deadline) < args.now_s then return {'void'} end
local last = redis.call('HGET', run, 'step')
if tonumber(last) + 1 ~= args.step then return {'order', last} end
redis.call('RPUSH', key('ledger'), args.line)
if args.trained ~= '' then
  -- it is for people alone: no step is refused because of it
  local length = redis.pcall('RPUSH', key('trained'), args.trained)
  local extra = type(length) == 'number' and length - args.num_kept or 0
  if extra > 0 then
    redis.call('LTRIM', key('trained'), extra, -1)
    redis.pcall('HINCRBY', counters, 'trained_steps:dropped', extra)
  end
end
redis.call('HSET', key('ledger_steps'), name, args.batch_id)
redis.call('HSET', run, 'step', step)
redis.call('ZREM', key('open_batches'), args.member)
redis.call('HDEL', key('open_steps'), lineage .. '|' .. step)
redis.call('DEL', key('batch:' .. args.batch_id))
redis.pcall('HINCRBY', counters, 'trained', args.num_trained)
for age, number in pairs(args.ages) do redis.pcall('HINCRBY', key('ages'), age, number) end
for name, number in pairs(args.counts) do redis.pcall('HINCRBY', counters, name, number) end
return {'ok'}
