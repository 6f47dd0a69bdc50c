-- Give leases that a searcher still works on a new deadline.
-- KEYS: 1 leases, 2 lease_deadlines, 3 counters
-- ARGV: 1 searcher id, 2 new deadline_s, then lease ids
-- Returns the ids of those that are not (or no longer) its own.
local lost = {}
for i = 3, #ARGV do
  local text = redis.call('HGET', KEYS[1], ARGV[i])
  local lease = text and read_lease(text)
  if lease and lease.s == ARGV[1] then
    redis.call('ZADD', KEYS[2], ARGV[2], ARGV[i])
  else
    lost[#lost + 1] = ARGV[i]
    if lease then redis.pcall('HINCRBY', KEYS[3], 'foreign:renew', 1) end
  end
end
return lost
