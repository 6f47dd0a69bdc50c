-- Change the state of the run.
-- KEYS: 1 run
-- ARGV: 1 new state, 2 reason, 3 token or '', 4 '1' if the token must be the living one, then the states that allow it
-- Returns {'fenced'}, {'refused', state} or {'ok', state}.
if ARGV[4] == '1' and redis.call('HGET', KEYS[1], 'token') ~= ARGV[3] then return {'fenced'} end
local state = redis.call('HGET', KEYS[1], 'state') or 'running'
if state == ARGV[1] then return {'ok', state} end
for i = 5, #ARGV do
  if ARGV[i] == state then
    redis.call('HSET', KEYS[1], 'state', ARGV[1], 'reason', ARGV[2])
    return {'ok', ARGV[1]}
  end
end
return {'refused', state}
