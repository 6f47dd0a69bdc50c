-- Change the state of the run, with a line of the audit. A rollback that waits forbids `done`; a stop or a failure
-- withdraws it, and the line says so.
-- KEYS: 1 run, 2 run_changes
-- ARGV: 1 new state, 2 reason, 3 token or '', 4 '1' if the token must be the active one, 5 now_s, 6 JSON of the command,
--       7 JSON of the role, 8 JSON of the reason, then the states that allow it
-- Returns {'fenced'}, {'refused', state}, {'rollback', JSON of the one that waits} or {'ok', state}.
if ARGV[4] == '1' and redis.call('HGET', KEYS[1], 'token') ~= ARGV[3] then return {'fenced'} end
local run = redis.call('HMGET', KEYS[1], 'state', 'lineage', 'step', 'rollback')
local state = run[1] or 'running'
if state == ARGV[1] then return {'ok', state} end
if run[4] and ARGV[1] == 'done' then return {'rollback', run[4]} end
local withdraws = ARGV[1] == 'stopping' or ARGV[1] == 'failed'
local _, withdrawn = rollback_in(withdraws and run[4])
for i = 9, #ARGV do
  if ARGV[i] == state then
    local change = '{"number":' .. redis.call('LLEN', KEYS[2]) + 1 .. ',"at_s":' .. ARGV[5] .. ',"command":' .. ARGV[6]
      .. ',"role":' .. ARGV[7] .. ',"reason":' .. ARGV[8] .. ',"old":"' .. state .. '","new":"' .. ARGV[1]
      .. '","lineage":' .. (run[2] or '0') .. ',"step":' .. (run[3] or '0')
      .. (withdrawn and ',"rollback":"' .. withdrawn .. '"}' or '}')
    if withdraws then redis.call('HDEL', KEYS[1], 'rollback') end
    redis.call('RPUSH', KEYS[2], change)
    redis.call('HSET', KEYS[1], 'state', ARGV[1], 'reason', ARGV[2], 'change', change)
    return {'ok', ARGV[1]}
  end
end
return {'refused', state}
