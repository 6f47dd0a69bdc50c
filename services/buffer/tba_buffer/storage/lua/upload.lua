-- Add prompts, all or nothing. The same id with the same content is accepted again.
-- KEYS: 1 prompts, 2 prompt_order, 3 epoch
-- ARGV: 1 epoch, then pairs of prompt id, canonical JSON
-- Returns 'superseded', {'conflict', prompt id} or {'ok', number of new ones}.
if redis.call('GET', KEYS[3]) ~= ARGV[1] then return 'superseded' end
for i = 2, #ARGV, 2 do
  local old = redis.call('HGET', KEYS[1], ARGV[i])
  if old and old ~= ARGV[i + 1] then return {'conflict', ARGV[i]} end
end
local num_new = 0
for i = 2, #ARGV, 2 do
  if redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[i + 1]) == 1 then
    redis.call('RPUSH', KEYS[2], ARGV[i])
    num_new = num_new + 1
  end
end
return {'ok', num_new}
