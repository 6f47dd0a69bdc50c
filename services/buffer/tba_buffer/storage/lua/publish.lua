-- Publish a version: announce it, and add an event to the log. A version that the active lineage has published before
-- is answered with that position, and nothing changes. A new lineage may publish a version of its history once more.
-- Searchers sample with the newest version of this start of the trainer that is at least so many steps older
-- (`sampling.lag_steps`), or with its first one. They never go back: a buffer that is started again with another lag
-- could name one that the trainer has deleted.
-- KEYS: 1 run, 2 log, 3 counters, 4 batches_since_publication, 5 announced
-- ARGV: 1 token, 2 lineage of the version, 3 step of the version, 4 lag in steps
-- Returns {'fenced'} or {'ok', position}.
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return {'fenced'} end
local version = ARGV[2] .. '-' .. ARGV[3]
-- a late repeat must not take the run back; only the active lineage publishes, so what came after its start is its own
local published = redis.call('HGET', KEYS[5], version)
local lineage_position = tonumber(redis.call('HGET', KEYS[1], 'lineage_position') or '0')
if published and tonumber(published) > lineage_position then
  return {'ok', published}
end
local position = string.format('%.0f', tonumber(redis.call('HGET', KEYS[3], 'log_position') or '0') + 1)
redis.call('XADD', KEYS[2], position .. '-0', 'm', ARGV[2] .. ' ' .. ARGV[3])
redis.call('HSET', KEYS[3], 'log_position', position, 'scored_at_mark',
  redis.call('HGET', KEYS[3], 'scored_total') or '0')
redis.pcall('HINCRBY', KEYS[3], 'marks', 1) -- pcall: a damaged count must not end this half way
redis.call('DEL', KEYS[4])
redis.call('HSET', KEYS[5], version, position)

local sampled, lag = version, tonumber(ARGV[4])
if lag > 0 then
  local function step_of(name) return tonumber(string.match(name, '^%d+%-(%d+)$')) end
  local function is_of_this_start(at) return (tonumber(at or '') or 0) > lineage_position end
  local highest, best, lowest = tonumber(ARGV[3]) - lag, tonumber(ARGV[3]), 0
  local last = redis.call('HGET', KEYS[1], 'sampling_version')
  if last and is_of_this_start(redis.call('HGET', KEYS[5], last)) then lowest = step_of(last) or 0 end
  local announced = redis.call('HGETALL', KEYS[5])
  for i = 1, #announced, 2 do
    local step = step_of(announced[i])
    if step and step >= lowest and is_of_this_start(announced[i + 1]) then
      -- below the bound the newest one, else the oldest that there is
      local is_better = step <= highest and (best > highest or step > best) or best > highest and step < best
      if is_better then sampled, best = announced[i], step end
    end
  end
end
redis.call('HSET', KEYS[1], 'latest_version', version, 'sampling_version', sampled)
return {'ok', position}
