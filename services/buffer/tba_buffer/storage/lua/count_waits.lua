-- Count how long a trainer has waited. It sends how long since its start, and the difference to the longest time that it
-- sent before is counted, so a heartbeat that is lost, repeated or late changes nothing.
-- KEYS: 1 trainer_waits
-- ARGV: 1 component id, 2 when the trainer started (Unix seconds), 3 most names of waits, 4 the name for all others,
--       5 most trainers that are remembered, then pairs of a wait's name, seconds since the start
-- Returns nothing.
local field = 'seen:' .. ARGV[1]
local text = redis.call('HGET', KEYS[1], field)
local function read_seen(json)
  local is_read, value = pcall(cjson.decode, json)
  is_read = is_read and type(value) == 'table' and tonumber(value.started) and type(value.waited) == 'table'
  return is_read and value
end
local nothing = {started = ARGV[2], waited = {}}
local known = text and read_seen(text)
local seen, is_damaged = known or nothing, text and not known
if tonumber(seen.started) > tonumber(ARGV[2]) then return end
if tonumber(seen.started) < tonumber(ARGV[2]) then seen = nothing end
local names
for i = 6, #ARGV, 2 do
  -- what was counted before cannot be read: the counting continues from here
  if is_damaged then seen.waited[ARGV[i]] = tonumber(ARGV[i + 1]) end
  local name, more_s = ARGV[i], tonumber(ARGV[i + 1]) - (tonumber(seen.waited[ARGV[i]]) or 0)
  if more_s > 0 then
    seen.waited[name] = tonumber(ARGV[i + 1])
    if redis.call('HEXISTS', KEYS[1], 'total:' .. name) == 0 then
      if not names then
        names = 0
        for _, known in ipairs(redis.call('HKEYS', KEYS[1])) do
          if string.sub(known, 1, 6) == 'total:' then names = names + 1 end
        end
      end
      if names >= tonumber(ARGV[3]) then name = ARGV[4] else names = names + 1 end
    end
    redis.pcall('HINCRBYFLOAT', KEYS[1], 'total:' .. name, string.format('%.6f', more_s))
  end
end
redis.call('HSET', KEYS[1], field, cjson.encode(seen))
if text then return end
-- a new trainer: those that started first are dead, and forgotten
local started = {}
for _, known in ipairs(redis.call('HKEYS', KEYS[1])) do
  if string.sub(known, 1, 5) == 'seen:' then
    local other = read_seen(redis.call('HGET', KEYS[1], known))
    table.insert(started, {other and tonumber(other.started) or 0, known})
  end
end
table.sort(started, function(a, b) return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2]) end)
for i = 1, #started - tonumber(ARGV[5]) do redis.call('HDEL', KEYS[1], started[i][2]) end
