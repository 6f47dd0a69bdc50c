-- Set the desired number of searchers, increase the revision, and add a line to the audit. A repeated request id
-- changes nothing and gets the revision of its change.
-- args: request_id, now_s, num_searchers (absent: as the recipe or the chart says), reason
-- Returns 'superseded' or {'ok', revision}.
if is_superseded() then return 'superseded' end
local scaling = key('scaling')
local known = redis.call('HGET', key('scaling_requests'), args.request_id)
if known then return {'ok', tonumber(known)} end
local run = redis.call('HMGET', key('run'), 'lineage', 'step')
local revision = redis.call('HINCRBY', scaling, 'revision', 1)
local old, new = redis.call('HGET', scaling, 'wanted') or 'null', 'null'
if args.num_searchers then
  new = digits(args.num_searchers)
  redis.call('HSET', scaling, 'wanted', new)
else
  redis.call('HDEL', scaling, 'wanted')
end
local reason = args.reason and cjson.encode(args.reason) or 'null'
redis.call('RPUSH', key('scaling_changes'), string.format(
  '{"revision":%d,"at_s":%.17g,"role":"operator","reason":%s,"lineage":%s,"step":%s,"old":%s,"new":%s}',
  revision, args.now_s, reason, run[1] or '0', run[2] or '0', old, new))
redis.call('HSET', key('scaling_requests'), args.request_id, revision)
return {'ok', revision}
