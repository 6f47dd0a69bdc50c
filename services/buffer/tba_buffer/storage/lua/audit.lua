-- Prelude of the scripts that write a line of the audit. A damaged state, lineage or step must not damage that line.
local STATES = {running = true, paused = true, stopping = true, done = true, failed = true}

local function known_state(text)
  if not text then return 'running' end
  return STATES[text] and text or 'failed'
end

local function count_in(text) -- JSON of a whole number of up to 15 digits; 0 where there is none
  local digits = text and #text <= 15 and string.match(text, '^%d+$') or '0'
  return string.format('%.0f', tonumber(digits))
end
