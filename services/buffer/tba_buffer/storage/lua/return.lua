-- Release leases that a searcher gives back, if it holds them. Unknown leases are ignored, since they have ended.
-- Damaged leases are ignored too, since they expire.
-- args: searcher_id, returned (ids of leases to grant again), refused (ids of leases of visits that nobody can sample)
-- Returns nothing.
for _, why in ipairs({'returned', 'refused'}) do
  for _, lease_id in ipairs(args[why]) do
    local lease = read_lease(lease_id)
    if lease and lease.s == args.searcher_id then
      release(lease_id, why)
    elseif lease then
      redis.pcall('HINCRBY', key('counters'), 'foreign:return', 1)
    end
  end
end
