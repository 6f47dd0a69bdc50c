-- Change live settings: the next revision, and a line of the audit. A request id that made a change before changes
-- nothing.
-- KEYS: 1 run, 2 settings, 3 settings_changes, 4 settings_requests, 5 epoch
-- ARGV: 1 request id, 2 token ('': an operator's), 3 epoch, 4 revision that the new values were checked with (-1: none),
--       5 now_s, 6 JSON of the role, 7 JSON of the reason, then pairs of a setting and JSON of its new value ('null': as
--       the recipe says)
-- Returns 'superseded', {'fenced'}, {'done'}, {'moved'}: the revision is another, check again; or {'ok', revision}.
if redis.call('GET', KEYS[5]) ~= ARGV[3] then return 'superseded' end
if ARGV[2] ~= '' and redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] then return {'fenced'} end
local known = redis.call('HGET', KEYS[4], ARGV[1])
if known then return {'ok', tonumber(known)} end
local run = redis.call('HMGET', KEYS[1], 'state', 'lineage', 'step')
if run[1] == 'done' then return {'done'} end
if (redis.call('HGET', KEYS[2], 'revision') or '0') ~= ARGV[4] then return {'moved'} end
local revision = redis.call('HINCRBY', KEYS[2], 'revision', 1)
local changes = {}
for i = 8, #ARGV, 2 do
  local field = 'value:' .. ARGV[i]
  local old = redis.call('HGET', KEYS[2], field) or 'null'
  changes[#changes + 1] = '"' .. ARGV[i] .. '":{"old":' .. old .. ',"new":' .. ARGV[i + 1] .. '}'
  if ARGV[i + 1] == 'null' then
    redis.call('HDEL', KEYS[2], field)
  else
    redis.call('HSET', KEYS[2], field, ARGV[i + 1])
  end
end
redis.call('RPUSH', KEYS[3], '{"revision":' .. revision .. ',"at_s":' .. ARGV[5] .. ',"role":' .. ARGV[6]
  .. ',"reason":' .. ARGV[7] .. ',"lineage":' .. (run[2] or '0') .. ',"step":' .. (run[3] or '0')
  .. ',"changes":{' .. table.concat(changes, ',') .. '}}')
redis.call('HSET', KEYS[4], ARGV[1], revision)
return {'ok', revision}
