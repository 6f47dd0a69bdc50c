-- Open an evaluation, or answer the one that exists. An expired one is opened again and keeps its results.
-- KEYS: 1 evals, 2 eval_order, 3 eval_todo, 4 eval_results
-- ARGV: 1 eval id, 2 JSON of the evaluation, 3 now_s, then its units
-- Returns the JSON of the evaluation as it stands.
local text = redis.call('HGET', KEYS[1], ARGV[1])
if text then
  local old = cjson.decode(text)
  if old.state ~= 'pending' or old.deadline_s > tonumber(ARGV[3]) then return text end
else
  redis.call('RPUSH', KEYS[2], ARGV[1])
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
for i = 4, #ARGV do
  redis.call('LREM', KEYS[3], 0, ARGV[i])
  if redis.call('HEXISTS', KEYS[4], ARGV[i]) == 0 then redis.call('RPUSH', KEYS[3], ARGV[i]) end
end
return ARGV[2]
