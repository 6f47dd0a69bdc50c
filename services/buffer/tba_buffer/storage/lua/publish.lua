-- Publish a version: announce it, and add an event to the log. If the active lineage has published the version before,
-- nothing changes, and the position of that event is returned. A new lineage may publish versions of its history again.
-- Then choose the version that searchers sample with: the newest one published since this start of the trainer that is
-- at least `lag` steps older, else the oldest one. The choice never goes back to an older step: a buffer restarted with
-- another lag could choose a version that the trainer has deleted.
-- args: token, lineage and step of the version, lag (in steps; `sampling.lag_steps`)
-- Returns {'fenced'} or {'ok', position}.
local run, counters, announced = key('run'), key('counters'), key('announced')
if redis.call('HGET', run, 'token') ~= args.token then return {'fenced'} end
local version = digits(args.lineage) .. '-' .. digits(args.step)
-- a late repeat must not take the run back; only the active lineage publishes, so what came after its start is its own
local published = redis.call('HGET', announced, version)
local lineage_position = tonumber(redis.call('HGET', run, 'lineage_position') or '0')
if published and tonumber(published) > lineage_position then
  return {'ok', published}
end
local position = append(next_position(), 'm', digits(args.lineage) .. ' ' .. digits(args.step))
redis.call('HSET', counters, 'scored_at_mark', redis.call('HGET', counters, 'scored_total') or '0')
redis.pcall('HINCRBY', counters, 'marks', 1) -- pcall: a damaged count must not end this half way
redis.call('DEL', key('batches_since_mark'))
redis.call('HSET', announced, version, position)

local sampled = version
if args.lag > 0 then
  local function step_of(name) return tonumber(string.match(name, '^%d+%-(%d+)$')) end
  local function is_of_this_start(at) return (tonumber(at or '') or 0) > lineage_position end
  local highest, best, lowest = args.step - args.lag, args.step, 0
  local last = redis.call('HGET', run, 'sampling_version')
  if last and is_of_this_start(redis.call('HGET', announced, last)) then lowest = step_of(last) or 0 end
  local every = redis.call('HGETALL', announced)
  for i = 1, #every, 2 do
    local step = step_of(every[i])
    if step and step >= lowest and is_of_this_start(every[i + 1]) then
      -- below the bound the newest one, else the oldest that there is
      local is_better = step <= highest and (best > highest or step > best) or best > highest and step < best
      if is_better then sampled, best = every[i], step end
    end
  end
end
redis.call('HSET', run, 'latest_version', version, 'sampling_version', sampled)
return {'ok', position}
