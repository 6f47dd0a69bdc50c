-- Prelude of the scripts that write lines of the audit, or note since when a change of live settings is in effect.
-- A damaged state, lineage or step must not damage a line.
local STATES = {running = true, paused = true, stopping = true, done = true, failed = true}

local function known_state(text)
  if not text then return 'running' end
  return STATES[text] and text or 'failed'
end

local function count_in(text) -- JSON of a whole number of up to 15 digits; 0 where there is none
  local digits = text and #text <= 15 and string.match(text, '^%d+$') or '0'
  return string.format('%.0f', tonumber(digits))
end

-- Read the rollback that waits: its request id and the version that it returns to. Nothing where there is none, or a
-- damaged one, which nobody obeys by a guess.
local function rollback_in(text)
  local is_read, asked = pcall(cjson.decode, text or 'null')
  local version = is_read and type(asked) == 'table' and string.match(tostring(asked.version), '^%d+%-%d+$')
  if version then return tostring(asked.request_id), version end
end

-- `took_effect` notes, in the same atomic call, each change that is in effect for the first time in this lineage.
-- `settings`, `changes`, `effects`: keys. `names`: settings, with spaces between. `revision`: what was acted on.
-- seen:<name> of `settings` is the revision up to which the changes of that setting have been looked at.
local function took_effect(settings, changes, effects, names, revision, lineage, step, now)
  revision = math.min(tonumber(revision), tonumber(redis.call('HGET', settings, 'revision') or '0') or 0)
  if revision == 0 then return end
  for name in string.gmatch(names, '%S+') do
    local seen = math.max(0, tonumber(redis.call('HGET', settings, 'seen:' .. name) or '0') or 0) -- a damaged one: none
    for number = revision, seen + 1, -1 do
      local is_read, change = pcall(cjson.decode, redis.call('LINDEX', changes, number - 1)) -- a damaged line names none
      local changed = is_read and type(change) == 'table' and change.changes
      if type(changed) == 'table' and changed[name] then
        redis.call('ZADD', effects, number, '{"revision":' .. number .. ',"name":"' .. name .. '","lineage":' .. lineage
          .. ',"step":' .. step .. ',"at_s":' .. now .. '}')
        break
      end
    end
    if revision > seen then redis.call('HSET', settings, 'seen:' .. name, revision) end
  end
end
