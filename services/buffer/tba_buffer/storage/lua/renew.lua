-- Set a new deadline for leases that a searcher still works on.
-- args: searcher_id, deadline_s (the new one), lease_ids
-- Returns the ids of the leases that the searcher does not hold, or no longer holds.
local lost = {}
for _, lease_id in ipairs(args.lease_ids) do
  local lease = read_lease(lease_id)
  if lease and lease.s == args.searcher_id then
    redis.call('ZADD', key('lease_deadlines'), args.deadline_s, lease_id)
  else
    lost[#lost + 1] = lease_id
    if lease then redis.pcall('HINCRBY', key('counters'), 'foreign:renew', 1) end
  end
end
return lost
