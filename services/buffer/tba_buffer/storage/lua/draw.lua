-- Record a drawn batch, if the run still allows it. One that was drawn before another was recorded is refused.
-- KEYS: 1 run, 2 counters, 3 open_batches, 4 batch:<id>, 5 batches_since_publication, 6 open_steps, 7 log
-- ARGV: 1 token, 2 lineage, 3 step, 4 member of open_batches, 5 deadline_s, 6 earliest deadline_s of an open batch that
--       is worth answering, 7 record, 8 its lifetime in milliseconds, 9 rollouts,
--       10 most rollouts drawn, 11 most batches since the publication, 12 publications as the caller saw them ('' each: no
--       limit), 13 log position that it was drawn at, 14 its event of the log, then pairs of slot counter, count
-- Returns {'ok'}; {'open', member}: another batch is open for this step, nothing was recorded; {'fenced'};
-- {'state', state that forbids it}; {'acked', last acked step}; {'flow'}: one of the limits is reached; {'stale'}: another
-- batch was drawn after that log position, so turns and uses are others now.
local step = ARGV[2] .. '|' .. ARGV[3]
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] or redis.call('HGET', KEYS[1], 'lineage') ~= ARGV[2] then
  return {'fenced'}
end
local open = redis.call('HGET', KEYS[6], step)
if open == ARGV[4] then return {'ok'} end
local state = redis.call('HGET', KEYS[1], 'state') or 'running'
if state ~= 'running' then return {'state', state} end
local last = redis.call('HGET', KEYS[1], 'step') or '0'
if tonumber(ARGV[3]) <= tonumber(last) then return {'acked', last} end
local open_until = open and redis.call('ZSCORE', KEYS[3], open)
local is_late = open_until and tonumber(open_until) < tonumber(ARGV[6])
if open_until and not is_late then return {'open', open} end

local function count(name) return tonumber(redis.call('HGET', KEYS[2], name) or '0') end
local late_rollouts = is_late and tonumber(string.match(open, '^[^|]*|(%d+)|')) or 0
local drawn, since_mark = count('drawn') - count('void') - late_rollouts, redis.call('SCARD', KEYS[5])
if is_late then since_mark = since_mark - redis.call('SISMEMBER', KEYS[5], open) end
if (ARGV[10] ~= '' and drawn + tonumber(ARGV[9]) > tonumber(ARGV[10]))
    or (ARGV[11] ~= '' and since_mark + 1 > tonumber(ARGV[11]))
    or (ARGV[12] ~= '' and count('marks') ~= tonumber(ARGV[12])) then
  return {'flow'}
end
-- a damaged one counts as none: draws of one process follow each other anyway
if (tonumber(redis.call('HGET', KEYS[2], 'draw_position') or '') or 0) > tonumber(ARGV[13]) then return {'stale'} end

local position = next_position(KEYS[2])
redis.call('SET', KEYS[4], ARGV[7], 'PX', ARGV[8])
if is_late then
  redis.call('ZREM', KEYS[3], open)
  redis.call('SREM', KEYS[5], open)
  redis.call('HINCRBY', KEYS[2], 'void', late_rollouts)
  append(KEYS[7], KEYS[2], position, 'v', string.match(open, '^[^|]*'))
  position = position + 1
end
redis.call('HSET', KEYS[2], 'draw_position', append(KEYS[7], KEYS[2], position, 'd', ARGV[14]))
redis.call('ZADD', KEYS[3], ARGV[5], ARGV[4])
redis.call('HSET', KEYS[6], step, ARGV[4])
redis.call('SADD', KEYS[5], ARGV[4])
redis.call('HINCRBY', KEYS[2], 'drawn', ARGV[9])
redis.pcall('HINCRBY', KEYS[2], 'batches', 1)
for i = 15, #ARGV, 2 do
  if ARGV[i + 1] ~= '0' then redis.pcall('HINCRBY', KEYS[2], 'slots:' .. ARGV[i], ARGV[i + 1]) end
end
return {'ok'}
