-- Release leases that a searcher gives back, if they are its own. Unknown ones are ignored, since they have ended, and
-- damaged ones too, since they expire.
-- args: searcher_id, returned (lease ids), refused (lease ids)
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
