-- Leases that a searcher gives back. Only its own; unknown ones are ignored (they have ended already).
-- KEYS: as in lease.lua
-- ARGV: 1 searcher id, then lease ids
-- Returns the number of leases that ended.
local num_ended = 0
for i = 2, #ARGV do
  local text = redis.call('HGET', KEYS[3], ARGV[i])
  if text and cjson.decode(text).s == ARGV[1] then
    release(ARGV[i], 'returned')
    num_ended = num_ended + 1
  end
end
return num_ended
