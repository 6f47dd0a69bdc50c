-- Prelude of the scripts that add lines to the audit. A damaged state, lineage or step must not damage a line.
local STATES = {running = true, paused = true, stopping = true, done = true, failed = true}

local function known_state(text)
  if not text then return 'running' end
  return STATES[text] and text or 'failed'
end

local function count_in(text) -- JSON of a whole number of up to 15 digits; 0 where there is none
  local number = text and #text <= 15 and string.match(text, '^%d+$') or '0'
  return string.format('%.0f', tonumber(number))
end

-- Add a line to `run_changes` and return it. `lineage` and `step` are texts; `more` is further JSON, or ''.
local function add_change(command, role, reason, old, new, lineage, step, more)
  local changes = key('run_changes')
  local line = string.format(
    '{"number":%d,"at_s":%.17g,"command":"%s","role":"%s","reason":%s,"old":"%s","new":"%s","lineage":%s,"step":%s%s}',
    redis.call('LLEN', changes) + 1, args.now_s, command, role, reason and cjson.encode(reason) or 'null', old, new,
    count_in(lineage), count_in(step), more)
  redis.call('RPUSH', changes, line)
  return line
end

-- Read the rollback that waits: its request id and the version that it returns to. Nothing where there is none, or a
-- damaged one, which nobody obeys by a guess.
local function rollback_in(text)
  local is_read, asked = pcall(cjson.decode, text or 'null')
  local version = is_read and type(asked) == 'table' and string.match(tostring(asked.version), '^%d+%-%d+$')
  if version then return tostring(asked.request_id), version end
end
