-- Record a drawn batch, if the run still allows it. A batch is refused if another was recorded since it was drawn.
-- args: token, lineage, step, batch_id, member (of open_batches), deadline_s, min_deadline_s (an open batch with an
--       earlier deadline becomes void), record, kept_ms (its lifetime), num_rollouts, log_position (that it was drawn
--       at), event (of the log), slots (slot counter -> count),
--       limits, absent where there is none: max_drawn (rollouts), max_batches (since the publication), publications (as
--       the caller saw them)
-- Returns {'ok'}; {'open', member}: another batch is open for this step, nothing was recorded; {'fenced'};
-- {'state', state that forbids it}; {'acked', last acked step}; {'flow'}: one of the limits is reached; {'stale'}:
-- another batch was recorded after that log position, so the turns of prompts and the uses of rollouts have changed.
local run, counters = key('run'), key('counters')
local open_batches, drawn_since = key('open_batches'), key('batches_since_mark')
local lineage = digits(args.lineage)
local step = lineage .. '|' .. digits(args.step)
if redis.call('HGET', run, 'token') ~= args.token or redis.call('HGET', run, 'lineage') ~= lineage then
  return {'fenced'}
end
local open = redis.call('HGET', key('open_steps'), step)
if open == args.member then return {'ok'} end
local state = redis.call('HGET', run, 'state') or 'running'
if state ~= 'running' then return {'state', state} end
local last = redis.call('HGET', run, 'step') or '0'
if args.step <= tonumber(last) then return {'acked', last} end
local open_until = open and redis.call('ZSCORE', open_batches, open)
local is_late = open_until and tonumber(open_until) < args.min_deadline_s
if open_until and not is_late then return {'open', open} end

local function count(name) return tonumber(redis.call('HGET', counters, name) or '0') end
local late_rollouts = is_late and tonumber(string.match(open, '^[^|]*|(%d+)|')) or 0
local drawn, since_mark = count('drawn') - count('void') - late_rollouts, redis.call('SCARD', drawn_since)
if is_late then since_mark = since_mark - redis.call('SISMEMBER', drawn_since, open) end
if (args.max_drawn and drawn + args.num_rollouts > args.max_drawn)
    or (args.max_batches and since_mark + 1 > args.max_batches)
    or (args.publications and count('marks') ~= args.publications) then
  return {'flow'}
end
-- a damaged one counts as none: draws of one process follow each other anyway
if (tonumber(redis.call('HGET', counters, 'draw_position') or '') or 0) > args.log_position then return {'stale'} end

local position = next_position()
redis.call('SET', key('batch:' .. args.batch_id), args.record, 'PX', args.kept_ms)
if is_late then
  redis.call('ZREM', open_batches, open)
  redis.call('SREM', drawn_since, open)
  redis.call('HINCRBY', counters, 'void', late_rollouts)
  append(position, 'v', string.match(open, '^[^|]*'))
  position = position + 1
end
redis.call('HSET', counters, 'draw_position', append(position, 'd', args.event))
redis.call('ZADD', open_batches, args.deadline_s, args.member)
redis.call('HSET', key('open_steps'), step, args.member)
redis.call('SADD', drawn_since, args.member)
redis.call('HINCRBY', counters, 'drawn', args.num_rollouts)
redis.pcall('HINCRBY', counters, 'batches', 1)
for name, number in pairs(args.slots) do
  if number > 0 then redis.pcall('HINCRBY', counters, 'slots:' .. name, number) end
end
return {'ok'}
