-- Note in the ledger that step (lineage, step) consumed a batch. Steps of a lineage are acked in order, once each.
-- KEYS: 1 run, 2 counters, 3 open_batches, 4 ledger, 5 ledger_steps, 6 ages, 7 batch:<id>, 8 open_steps, 9 trained
-- ARGV: 1 token, 2 lineage, 3 step, 4 batch id, 5 now_s, 6 member of open_batches, 7 JSON of the ledger line,
--       8 trained rollouts, 9 record of what became of each rollout or '', 10 how many of these records are kept,
--       11 number of ages, pairs of policy age, rollouts, then pairs of a counter, how much it grows
-- Returns {'fenced'}, {'other', batch id}, {'rollback', JSON of the one that waits}, {'void'}, {'order', last step}
-- or {'ok'}.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] or redis.call('HGET', KEYS[1], 'lineage') ~= ARGV[2] then
  return {'fenced'}
end
local name = ARGV[2] .. '-' .. ARGV[3]
local acked = redis.call('HGET', KEYS[5], name)
if acked == ARGV[4] then return {'ok'} end
if acked then return {'other', acked} end
local rollback = redis.call('HGET', KEYS[1], 'rollback')
if rollback then return {'rollback', rollback} end
local deadline = redis.call('ZSCORE', KEYS[3], ARGV[6])
if not deadline or tonumber(deadline) < tonumber(ARGV[5]) then return {'void'} end
local last = redis.call('HGET', KEYS[1], 'step')
if tonumber(last) + 1 ~= tonumber(ARGV[3]) then return {'order', last} end
redis.call('RPUSH', KEYS[4], ARGV[7])
if ARGV[9] ~= '' then
  -- it is for people alone: no step is refused because of it
  local length = redis.pcall('RPUSH', KEYS[9], ARGV[9])
  local extra = type(length) == 'number' and length - tonumber(ARGV[10]) or 0
  if extra > 0 then
    redis.call('LTRIM', KEYS[9], extra, -1)
    redis.pcall('HINCRBY', KEYS[2], 'trained_steps:dropped', extra)
  end
end
redis.call('HSET', KEYS[5], name, ARGV[4])
redis.call('HSET', KEYS[1], 'step', ARGV[3])
redis.call('ZREM', KEYS[3], ARGV[6])
redis.call('HDEL', KEYS[8], ARGV[2] .. '|' .. ARGV[3])
redis.call('DEL', KEYS[7])
redis.pcall('HINCRBY', KEYS[2], 'trained', ARGV[8])
local first_counter = 12 + 2 * tonumber(ARGV[11])
for i = 12, #ARGV, 2 do redis.pcall('HINCRBY', KEYS[i < first_counter and 6 or 2], ARGV[i], ARGV[i + 1]) end
return {'ok'}
