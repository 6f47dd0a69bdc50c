-- Ask searchers to try refused versions again, with a line of the audit. A repeated call changes nothing.
-- KEYS: 1 run, 2 run_changes
-- ARGV: 1 request id, 2 now_s, 3 JSON of the role, 4 JSON of the reason
-- Returns how often this was asked for.
if redis.call('HGET', KEYS[1], 'retried_by') == ARGV[1] then return tonumber(redis.call('HGET', KEYS[1], 'retries')) end
local number = redis.call('HINCRBY', KEYS[1], 'retries', 1)
redis.call('HSET', KEYS[1], 'retried_by', ARGV[1])
local run = redis.call('HMGET', KEYS[1], 'state', 'lineage', 'step')
local state = known_state(run[1])
redis.call('RPUSH', KEYS[2], '{"number":' .. redis.call('LLEN', KEYS[2]) + 1 .. ',"at_s":' .. ARGV[2]
  .. ',"command":"retry-versions","role":' .. ARGV[3] .. ',"reason":' .. ARGV[4] .. ',"old":"' .. state .. '","new":"' .. state
  .. '","lineage":' .. count_in(run[2]) .. ',"step":' .. count_in(run[3]) .. '}')
return number
