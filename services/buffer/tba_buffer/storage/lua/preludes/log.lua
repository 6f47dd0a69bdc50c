-- Prelude of the scripts that add single events to the log. `next_position` fails on a damaged number, so call it before
-- anything is changed.
local function next_position()
  return tonumber(redis.call('HGET', key('counters'), 'log_position') or '0') + 1
end

local function append(position, ...) -- field, value, ...; returns the position as text
  redis.call('XADD', key('log'), digits(position) .. '-0', ...)
  redis.call('HSET', key('counters'), 'log_position', digits(position))
  return digits(position)
end
