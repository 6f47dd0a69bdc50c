-- Prelude of the scripts that add single events to the log. `next_position` fails on a damaged number, so call it before
-- anything is changed.
local function next_position(counters)
  return tonumber(redis.call('HGET', counters, 'log_position') or '0') + 1
end

local function append(log, counters, position, field, value)
  local digits = string.format('%.0f', position)
  redis.call('XADD', log, digits .. '-0', field, value)
  redis.call('HSET', counters, 'log_position', digits)
  return digits
end
