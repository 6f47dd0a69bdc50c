-- Add prompts, all or nothing. The same id with the same content is accepted again.
-- args: prompts (prompt id, canonical JSON, ...)
-- Returns 'superseded', {'conflict', prompt id} or {'ok', number of new ones}.
local prompts = key('prompts')
if is_superseded() then return 'superseded' end
for i = 1, #args.prompts, 2 do
  local old = redis.call('HGET', prompts, args.prompts[i])
  if old and old ~= args.prompts[i + 1] then return {'conflict', args.prompts[i]} end
end
local num_new = 0
for i = 1, #args.prompts, 2 do
  if redis.call('HSETNX', prompts, args.prompts[i], args.prompts[i + 1]) == 1 then
    redis.call('RPUSH', key('prompt_order'), args.prompts[i])
    num_new = num_new + 1
  end
end
return {'ok', num_new}
