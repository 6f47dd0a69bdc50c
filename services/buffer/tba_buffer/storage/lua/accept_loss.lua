-- Accept that Redis has lost acknowledged changes: the run continues with the rest. A repeated call changes nothing.
-- args: acknowledged (the highest number that the buffer was told), num_lost (changes), now_s, role, reason, format,
--       request_id
-- Returns 'superseded' or the number from which the counting continues.
local function count_of(text) -- 0 where there is none, or a damaged one
  local number = tonumber(text or '0') or -1
  return number >= 0 and number <= 2 ^ 53 and number or 0
end
local counters, run = key('counters'), key('run')
if count_of(redis.call('GET', key('replica'))) > args.epoch then return 'superseded' end
local found = count_of(redis.call('HGET', counters, 'acknowledged'))
if redis.call('HGET', run, 'loss_accepted_by') == args.request_id then return found end
-- above every number that was told, also by earlier starts of the buffer, so that nobody finds this loss again
local number = math.max(found + args.num_lost, args.acknowledged) + 1
redis.call('SET', key('replica'), args.epoch)
redis.call('SET', key('format'), args.format)
redis.call('HSET', counters, 'acknowledged', digits(number))
redis.call('HDEL', run, 'changes_missing')
-- a counter that is damaged, or older than the log, continues behind the log
local last = redis.call('XREVRANGE', key('log'), '+', '-', 'COUNT', 1)[1]
local log_end = last and tonumber(string.match(last[1], '^%d+')) or 0
local base_end = count_of(redis.call('HGET', key('base'), 'position'))
local position = math.max(log_end, base_end, count_of(redis.call('HGET', counters, 'log_position')))
redis.call('HSET', counters, 'log_position', digits(position))
redis.call('HSET', run, 'loss_accepted_by', args.request_id)
redis.pcall('HINCRBY', run, 'losses_accepted', 1)
redis.pcall('HINCRBY', run, 'changes_lost', args.num_lost)
local fields = redis.call('HMGET', run, 'state', 'lineage', 'step')
local state = known_state(fields[1])
add_change('accept-loss', args.role, args.reason, state, state, fields[2], fields[3],
  ',"num_lost":' .. digits(args.num_lost))
return number
