-- A sync mark: announce a version and put an event into the log. Idempotent for one token and version.
-- KEYS: 1 run, 2 log, 3 counters, 4 batches_since_mark, 5 announced
-- ARGV: 1 token, 2 lineage of the version, 3 step of the version
-- Returns {'fenced'} or {'ok', position}.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return {'fenced'} end
local version = ARGV[2] .. '-' .. ARGV[3]
local marked = version .. ' ' .. ARGV[1]
if redis.call('HGET', KEYS[1], 'marked_version') == marked then
  return {'ok', redis.call('HGET', KEYS[1], 'marked_position')}
end
local position = string.format('%.0f', tonumber(redis.call('HGET', KEYS[3], 'log_position') or '0') + 1)
redis.call('XADD', KEYS[2], position .. '-0', 'm', ARGV[2] .. ' ' .. ARGV[3])
redis.call('HSET', KEYS[3], 'log_position', position, 'scored_at_mark',
  redis.call('HGET', KEYS[3], 'scored_total') or '0')
redis.call('HINCRBY', KEYS[3], 'marks', 1)
redis.call('DEL', KEYS[4])
redis.call('HSET', KEYS[5], version, position)
redis.call('HSET', KEYS[1], 'latest_version', version, 'marked_version', marked, 'marked_position', position)
return {'ok', position}
