-- Release leases that a searcher gives back, if they are its own. Unknown ones are ignored, since they have ended, and
-- damaged ones too, since they expire.
-- KEYS: as in lease.lua
-- ARGV: 1 searcher id, 2 number of returned leases, then their ids, then the ids of refused leases
-- Returns nothing.
local num_returned = tonumber(ARGV[2])
for i = 3, #ARGV do
  local text = redis.call('HGET', KEYS[3], ARGV[i])
  local lease = text and read_lease(text)
  if lease and lease.s == ARGV[1] then
    release(ARGV[i], i <= 2 + num_returned and 'returned' or 'refused')
  elseif lease then
    redis.pcall('HINCRBY', KEYS[6], 'foreign:return', 1)
  end
end
