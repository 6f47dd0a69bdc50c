-- Void the open batches past their deadline, then read the state that draws and leases depend on.
-- A void batch can no longer be acked, and its rollouts no longer count as drawn.
-- args: now_s, member (of open_batches, to be voided whatever its deadline; absent: none)
-- Returns {{state, token, lineage, latest_version, sampling_version, step, rollback},
-- {log_position, scored_total, inflight, drawn, void, scored_at_mark, marks}, batches since the publication,
-- revision of the live settings}; absent values are false.
local run, counters = key('run'), key('counters')
local open_batches, drawn_since = key('open_batches'), key('batches_since_mark')
local MOST_PER_CALL = 1000
local num_rollouts, batch_ids = 0, {}
local function void(member)
  if redis.call('ZREM', open_batches, member) == 0 then return end
  local number, step = string.match(member, '^[^|]*|(%d+)|(.*)$')
  if not number then return end
  num_rollouts = num_rollouts + tonumber(number)
  batch_ids[#batch_ids + 1] = string.match(member, '^[^|]*')
  redis.call('SREM', drawn_since, member)
  if redis.call('HGET', key('open_steps'), step) == member then redis.call('HDEL', key('open_steps'), step) end
end
local before = string.format('(%.17g', args.now_s)
local late = redis.call('ZRANGEBYSCORE', open_batches, '-inf', before, 'LIMIT', 0, MOST_PER_CALL)
if #late > 0 or args.member then
  local position = next_position()
  for _, member in ipairs(late) do void(member) end
  if args.member then void(args.member) end
  if num_rollouts > 0 then redis.call('HINCRBY', counters, 'void', num_rollouts) end
  if #batch_ids > 0 then append(position, 'v', table.concat(batch_ids, ' ')) end
end
return {
  redis.call('HMGET', run, 'state', 'token', 'lineage', 'latest_version', 'sampling_version', 'step', 'rollback'),
  redis.call('HMGET', counters, 'log_position', 'scored_total', 'inflight', 'drawn', 'void', 'scored_at_mark', 'marks'),
  redis.call('SCARD', drawn_since),
  redis.call('HGET', key('settings'), 'revision'),
}
