-- Accept that Redis has lost what was acknowledged: the run continues with the rest. A repeated call changes nothing.
-- KEYS: 1 epoch, 2 counters, 3 run, 4 run_changes, 5 format, 6 log, 7 checkpoint of the log
-- ARGV: 1 epoch, 2 the highest number that was told, 3 number of changes that are lost, 4 now_s, 5 JSON of the role,
--       6 JSON of the reason, 7 format, 8 request id
-- Returns 'superseded' or the number from which the counting continues.
local function count_of(text) -- 0 where there is none, or a damaged one
  local number = tonumber(text or '0') or -1
  return number >= 0 and number <= 2 ^ 53 and number or 0
end
if count_of(redis.call('GET', KEYS[1])) > tonumber(ARGV[1]) then return 'superseded' end
local found = count_of(redis.call('HGET', KEYS[2], 'acknowledged'))
if redis.call('HGET', KEYS[3], 'loss_accepted_by') == ARGV[8] then return found end
-- above every number that was told, also by earlier starts of the buffer, so that nobody finds this loss again
local number = math.max(found + tonumber(ARGV[3]), tonumber(ARGV[2])) + 1
redis.call('SET', KEYS[1], ARGV[1])
redis.call('SET', KEYS[5], ARGV[7])
redis.call('HSET', KEYS[2], 'acknowledged', string.format('%.0f', number))
redis.call('HDEL', KEYS[3], 'changes_missing')
-- a counter that is damaged, or older than the log, continues behind the log
local last = redis.call('XREVRANGE', KEYS[6], '+', '-', 'COUNT', 1)[1]
local log_end = math.max(last and tonumber(string.match(last[1], '^%d+')) or 0, count_of(redis.call('HGET', KEYS[7], 'position')))
local position = math.max(log_end, count_of(redis.call('HGET', KEYS[2], 'log_position')))
redis.call('HSET', KEYS[2], 'log_position', string.format('%.0f', position))
redis.call('HSET', KEYS[3], 'loss_accepted_by', ARGV[8])
redis.pcall('HINCRBY', KEYS[3], 'losses_accepted', 1)
redis.pcall('HINCRBY', KEYS[3], 'changes_lost', ARGV[3])
local run = redis.call('HMGET', KEYS[3], 'state', 'lineage', 'step')
local state = known_state(run[1])
redis.call('RPUSH', KEYS[4], '{"number":' .. redis.call('LLEN', KEYS[4]) + 1 .. ',"at_s":' .. ARGV[4]
  .. ',"command":"accept-loss","role":' .. ARGV[5] .. ',"reason":' .. ARGV[6] .. ',"old":"' .. state .. '","new":"' .. state
  .. '","lineage":' .. count_in(run[2]) .. ',"step":' .. count_in(run[3]) .. ',"num_lost":' .. ARGV[3] .. '}')
return number
