-- Add the waits of a trainer to the totals. Each heartbeat has the seconds waited since the trainer started. Only the
-- growth over the largest value sent before is added, so lost, repeated or late heartbeats falsify nothing.
-- args: component_id, started_s (when the trainer started, Unix seconds), waited (name of the wait -> seconds since the
--       start), max_names (of waits), other (the name that counts all further waits), max_trainers (remembered ones)
-- Returns nothing.
local waits = key('trainer_waits')
local field = 'seen:' .. args.component_id
local text = redis.call('HGET', waits, field)
local function read_seen(json)
  local is_read, value = pcall(cjson.decode, json)
  is_read = is_read and type(value) == 'table' and tonumber(value.started) and type(value.waited) == 'table'
  return is_read and value
end
local nothing = {started = string.format('%.6f', args.started_s), waited = {}}
local known = text and read_seen(text)
local seen, is_damaged = known or nothing, text and not known
if tonumber(seen.started) > tonumber(nothing.started) then return end
if tonumber(seen.started) < tonumber(nothing.started) then seen = nothing end
local num_names
for name, waited_s in pairs(args.waited) do
  -- what was counted before cannot be read: the counting continues from here
  if is_damaged then seen.waited[name] = waited_s end
  local more_s = waited_s - (tonumber(seen.waited[name]) or 0)
  if more_s > 0 then
    seen.waited[name] = waited_s
    local counted_as = name
    if redis.call('HEXISTS', waits, 'total:' .. name) == 0 then
      if not num_names then
        num_names = 0
        for _, other in ipairs(redis.call('HKEYS', waits)) do
          if string.sub(other, 1, 6) == 'total:' then num_names = num_names + 1 end
        end
      end
      if num_names >= args.max_names then counted_as = args.other else num_names = num_names + 1 end
    end
    redis.pcall('HINCRBYFLOAT', waits, 'total:' .. counted_as, string.format('%.6f', more_s))
  end
end
redis.call('HSET', waits, field, cjson.encode(seen))
if text then return end
-- a new trainer: those that started first are dead, and forgotten
local started = {}
for _, other in ipairs(redis.call('HKEYS', waits)) do
  if string.sub(other, 1, 5) == 'seen:' then
    local trainer = read_seen(redis.call('HGET', waits, other))
    table.insert(started, {trainer and tonumber(trainer.started) or 0, other})
  end
end
table.sort(started, function(a, b) return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2]) end)
for i = 1, #started - args.max_trainers do redis.call('HDEL', waits, started[i][2]) end
