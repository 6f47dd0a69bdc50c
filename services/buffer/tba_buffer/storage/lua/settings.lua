-- Change live settings, increase the revision, and add a line to the audit. A repeated request id changes nothing and
-- gets the revision of its change.
-- args: request_id, token (absent: an operator asks), revision (that the new values were checked with; -1: none),
--       now_s, role, reason, values (setting, JSON of its new value, ...; 'null': as the recipe says)
-- Returns 'superseded', {'fenced'}, {'done'}: the run has ended; {'moved'}: the revision is another one, check the
-- values again; or {'ok', revision}.
local settings = key('settings')
if is_superseded() then return 'superseded' end
if args.token and redis.call('HGET', key('run'), 'token') ~= args.token then return {'fenced'} end
local known = redis.call('HGET', key('settings_requests'), args.request_id)
if known then return {'ok', tonumber(known)} end
local run = redis.call('HMGET', key('run'), 'state', 'lineage', 'step')
if run[1] == 'done' then return {'done'} end
if (redis.call('HGET', settings, 'revision') or '0') ~= digits(args.revision) then return {'moved'} end
local revision = redis.call('HINCRBY', settings, 'revision', 1)
local changes, reason = {}, args.reason and cjson.encode(args.reason) or 'null'
for at = 1, #args.values, 2 do
  local name, new = args.values[at], args.values[at + 1]
  local field = 'value:' .. name
  local old = redis.call('HGET', settings, field) or 'null'
  changes[#changes + 1] = string.format('"%s":{"old":%s,"new":%s}', name, old, new)
  if new == 'null' then redis.call('HDEL', settings, field) else redis.call('HSET', settings, field, new) end
end
redis.call('RPUSH', key('settings_changes'), string.format(
  '{"revision":%d,"at_s":%.17g,"role":"%s","reason":%s,"lineage":%s,"step":%s,"changes":{%s}}',
  revision, args.now_s, args.role, reason, run[2] or '0', run[3] or '0', table.concat(changes, ',')))
redis.call('HSET', key('settings_requests'), args.request_id, revision)
return {'ok', revision}
