-- Store results of evaluation leases; the first result of a unit counts, later ones are ignored.
-- KEYS: 1 eval_units, 2 eval_results, 3 eval_done, 4 leases, 5 lease_deadlines, 6 counters
-- ARGV: 1 eval id, then pairs of lease id, JSON of its result (leases known to belong to this evaluation and to this searcher)
-- Returns the number of units with a result.
for i = 2, #ARGV, 2 do
  local unit = string.match(redis.call('HGET', KEYS[1], ARGV[i]) or '', '^(%S+)')
  if unit then
    if redis.call('HSETNX', KEYS[2], unit, ARGV[i + 1]) == 1 then redis.call('HINCRBY', KEYS[3], ARGV[1], 1) end
    if redis.call('HDEL', KEYS[4], ARGV[i]) == 1 then redis.pcall('HINCRBY', KEYS[6], 'leases:fulfilled', 1) end
    redis.call('ZREM', KEYS[5], ARGV[i])
  end
end
return tonumber(redis.call('HGET', KEYS[3], ARGV[1]) or '0')
