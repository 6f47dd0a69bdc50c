-- Store results of evaluation leases; the first result of a unit counts, later ones are ignored.
-- args: eval_id, results (lease id, JSON of its result, ...; leases known to belong to this evaluation and to this
--       searcher)
-- Returns the number of units with a result.
for at = 1, #args.results, 2 do
  local lease_id, result = args.results[at], args.results[at + 1]
  local unit = string.match(redis.call('HGET', key('eval_units'), lease_id) or '', '^(%S+)')
  if unit then
    if redis.call('HSETNX', key('eval_results'), unit, result) == 1 then
      redis.call('HINCRBY', key('eval_done'), args.eval_id, 1)
    end
    if redis.call('HDEL', key('leases'), lease_id) == 1 then
      redis.pcall('HINCRBY', key('counters'), 'leases:fulfilled', 1)
    end
    redis.call('ZREM', key('lease_deadlines'), lease_id)
  end
end
return tonumber(redis.call('HGET', key('eval_done'), args.eval_id) or '0')
