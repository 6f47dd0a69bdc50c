-- Publish a version: announce it, and add an event to the log. A version that the active lineage has published before
-- is answered with that position, and nothing changes. A new lineage may publish a version of its history once more.
-- KEYS: 1 run, 2 log, 3 counters, 4 batches_since_publication, 5 announced
-- ARGV: 1 token, 2 lineage of the version, 3 step of the version
-- Returns {'fenced'} or {'ok', position}.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return {'fenced'} end
local version = ARGV[2] .. '-' .. ARGV[3]
-- a late repeat must not take the run back; only the active lineage publishes, so what came after its start is its own
local published = redis.call('HGET', KEYS[5], version)
if published and tonumber(published) > tonumber(redis.call('HGET', KEYS[1], 'lineage_position') or '0') then
  return {'ok', published}
end
local position = string.format('%.0f', tonumber(redis.call('HGET', KEYS[3], 'log_position') or '0') + 1)
redis.call('XADD', KEYS[2], position .. '-0', 'm', ARGV[2] .. ' ' .. ARGV[3])
redis.call('HSET', KEYS[3], 'log_position', position, 'scored_at_mark',
  redis.call('HGET', KEYS[3], 'scored_total') or '0')
redis.pcall('HINCRBY', KEYS[3], 'marks', 1) -- pcall: a damaged count must not end this half way
redis.call('DEL', KEYS[4])
redis.call('HSET', KEYS[5], version, position)
redis.call('HSET', KEYS[1], 'latest_version', version)
return {'ok', position}
