-- Count what a trainer has waited. It says how long it has waited since it started, so a heartbeat that is lost, repeated
-- or late costs nothing: what is counted is the difference to the longest time that it said before.
-- KEYS: 1 trainer_waits
-- ARGV: 1 component id, 2 when the trainer started (Unix seconds), 3 most names of waits, 4 the name for all others,
--       5 most trainers that are remembered, then pairs of a wait's name, seconds since the start
-- Returns nothing.
local field = 'seen:' .. ARGV[1]
local text = redis.call('HGET', KEYS[1], field)
local seen = text and cjson.decode(text) or {started = ARGV[2], waited = {}}
if tonumber(seen.started) > tonumber(ARGV[2]) then return end
if tonumber(seen.started) < tonumber(ARGV[2]) then seen = {started = ARGV[2], waited = {}} end
local names
for i = 6, #ARGV, 2 do
  local name, more_s = ARGV[i], tonumber(ARGV[i + 1]) - (seen.waited[ARGV[i]] or 0)
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
    redis.call('HINCRBYFLOAT', KEYS[1], 'total:' .. name, string.format('%.6f', more_s))
  end
end
redis.call('HSET', KEYS[1], field, cjson.encode(seen))
if text then return end
-- one more trainer: those that started first are dead, and forgotten
local started = {}
for _, known in ipairs(redis.call('HKEYS', KEYS[1])) do
  if string.sub(known, 1, 5) == 'seen:' then
    table.insert(started, {tonumber(cjson.decode(redis.call('HGET', KEYS[1], known)).started), known})
  end
end
table.sort(started, function(a, b) return a[1] < b[1] or (a[1] == b[1] and a[2] < b[2]) end)
for i = 1, #started - tonumber(ARGV[5]) do redis.call('HDEL', KEYS[1], started[i][2]) end
