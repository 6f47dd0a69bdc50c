-- A trainer starts: a new lineage and token, and a line of the ledger that says where it goes on. Open batches of the
-- older lineages become void.
-- KEYS: 1 run, 2 lineages, 3 open_batches, 4 counters, 5 batches_since_mark, 6 open_steps, 7 ledger, 8 ledger_steps,
--       9 announced
-- ARGV: 1 token, 2 JSON of the lineage, 3 lineage of the parent, 4 step of the parent,
--       5 JSON of the ledger line, 'LINEAGE' in place of the new number
-- Returns {'unknown-lineage'}, {'unknown-step'} or {'ok', lineage}.
-- A parent is a version that was made: the starting model, the start of its lineage, the result of an acked step, or
-- an announced, checkpointed or adopted one.
if redis.call('HGET', KEYS[1], 'token') == ARGV[1] then
  return {'ok', tonumber(redis.call('HGET', KEYS[1], 'lineage'))}
end
local parent = ARGV[3] .. '-' .. ARGV[4]
if parent ~= '0-0' then
  local text = redis.call('HGET', KEYS[2], ARGV[3])
  local start = text and string.match(cjson.decode(text).parent, '%-(%d+)$')
  local known = redis.call('HMGET', KEYS[1], 'checkpoint', 'forked_from')
  if not text and known[2] ~= parent then return {'unknown-lineage'} end
  if start ~= ARGV[4] and known[1] ~= parent and known[2] ~= parent
      and redis.call('HEXISTS', KEYS[8], parent) == 0 and redis.call('HEXISTS', KEYS[9], parent) == 0 then
    return {'unknown-step'}
  end
end
local lineage = redis.call('HINCRBY', KEYS[1], 'lineage', 1)
redis.call('HSET', KEYS[2], lineage, ARGV[2])
redis.call('RPUSH', KEYS[7], (string.gsub(ARGV[5], '"LINEAGE"', tostring(lineage), 1)))
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'step', ARGV[4])
if redis.call('HGET', KEYS[1], 'state') ~= 'paused' then
  redis.call('HSET', KEYS[1], 'state', 'running', 'reason', '')
end
local num_rollouts = 0
for _, member in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
  num_rollouts = num_rollouts + tonumber(string.match(member, '^[^|]*|(%d+)|'))
  redis.call('SREM', KEYS[5], member)
end
if num_rollouts > 0 then redis.call('HINCRBY', KEYS[4], 'void', num_rollouts) end
redis.call('DEL', KEYS[3], KEYS[6])
return {'ok', lineage}
