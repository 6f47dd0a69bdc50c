-- Void the open batches past their deadline, then read what draws and leases decide by.
-- A void batch can no longer be acked, and its rollouts no longer count as drawn.
-- KEYS: 1 run, 2 counters, 3 open_batches, 4 batches_since_publication, 5 open_steps, 6 settings, 7 log
-- ARGV: 1 now_s, then members of open_batches that become void whatever their deadline
-- Returns {{state, token, lineage, latest_version, sampling_version, step, rollback}, {log_position, scored_total, inflight, drawn, void,
-- scored_at_mark, marks}, batches since the publication, revision of the live settings}; absent values are false.
local MOST_PER_CALL = 1000
local num_rollouts, batch_ids = 0, {}
local function void(member)
  if redis.call('ZREM', KEYS[3], member) == 0 then return end
  local number, step = string.match(member, '^[^|]*|(%d+)|(.*)$')
  if not number then return end
  num_rollouts = num_rollouts + tonumber(number)
  batch_ids[#batch_ids + 1] = string.match(member, '^[^|]*')
  redis.call('SREM', KEYS[4], member)
  if redis.call('HGET', KEYS[5], step) == member then redis.call('HDEL', KEYS[5], step) end
end
local late = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', '(' .. ARGV[1], 'LIMIT', 0, MOST_PER_CALL)
if #late > 0 or #ARGV > 1 then
  local position = next_position(KEYS[2])
  for _, member in ipairs(late) do void(member) end
  for i = 2, #ARGV do void(ARGV[i]) end
  if num_rollouts > 0 then redis.call('HINCRBY', KEYS[2], 'void', num_rollouts) end
  if #batch_ids > 0 then append(KEYS[7], KEYS[2], position, 'v', table.concat(batch_ids, ' ')) end
end
return {
  redis.call('HMGET', KEYS[1], 'state', 'token', 'lineage', 'latest_version', 'sampling_version', 'step', 'rollback'),
  redis.call('HMGET', KEYS[2], 'log_position', 'scored_total', 'inflight', 'drawn', 'void', 'scored_at_mark', 'marks'),
  redis.call('SCARD', KEYS[4]),
  redis.call('HGET', KEYS[6], 'revision'),
}
