-- Open an evaluation, or accept the one that exists. An expired one is opened again and keeps its results.
-- KEYS: 1 evals, 2 eval_order, 3 eval_todo, 4 eval_results, 5 run, 6 announced
-- ARGV: 1 eval id, 2 JSON of the evaluation, 3 now_s, 4 token, 5 version, then its units
-- Returns 'fenced', 'unknown-version', 'exists' or 'ok'.
if redis.call('HGET', KEYS[5], 'token') ~= ARGV[4] then return 'fenced' end
if redis.call('HEXISTS', KEYS[6], ARGV[5]) == 0 then return 'unknown-version' end
local text = redis.call('HGET', KEYS[1], ARGV[1])
if text == ARGV[2] then return 'ok' end -- this very call, repeated
if text then
  local is_read, old = pcall(cjson.decode, text) -- a damaged one is written again
  if not is_read or type(old) ~= 'table' or type(old.deadline_s) ~= 'number' then old = {state = 'pending', deadline_s = 0} end
  if old.state ~= 'pending' or old.deadline_s > tonumber(ARGV[3]) then return 'exists' end
else
  redis.call('RPUSH', KEYS[2], ARGV[1])
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
for i = 6, #ARGV do
  redis.call('LREM', KEYS[3], 0, ARGV[i])
  if redis.call('HEXISTS', KEYS[4], ARGV[i]) == 0 then redis.call('RPUSH', KEYS[3], ARGV[i]) end
end
return 'ok'
