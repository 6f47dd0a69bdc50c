-- Open an evaluation, unless it exists. An expired evaluation is opened again and keeps its results.
-- args: eval_id, document (JSON of the evaluation), now_s, token, version, units ("eval id|kind|number")
-- Returns 'ok', 'fenced', 'unknown-version' or 'exists' (done, or pending and not expired: nothing is changed).
if redis.call('HGET', key('run'), 'token') ~= args.token then return 'fenced' end
if redis.call('HEXISTS', key('announced'), args.version) == 0 then return 'unknown-version' end
local text = redis.call('HGET', key('evals'), args.eval_id)
if text == args.document then return 'ok' end -- this very call, repeated
if text then
  local is_read, old = pcall(cjson.decode, text) -- a damaged one is written again
  if not is_read or type(old) ~= 'table' or type(old.deadline_s) ~= 'number' then
    old = {state = 'pending', deadline_s = 0}
  end
  if old.state ~= 'pending' or old.deadline_s > args.now_s then return 'exists' end
else
  redis.call('RPUSH', key('eval_order'), args.eval_id)
end
redis.call('HSET', key('evals'), args.eval_id, args.document)
for _, unit in ipairs(args.units) do
  redis.call('LREM', key('eval_todo'), 0, unit)
  if redis.call('HEXISTS', key('eval_results'), unit) == 0 then redis.call('RPUSH', key('eval_todo'), unit) end
end
return 'ok'
