-- Store new rewards of stored rollouts: log, replace, count, and note how far the re-scoring job is, all or nothing.
-- Rewards that are stored already are left alone, so a repeated call changes nothing.
-- KEYS: 1 payloads, 2 log, 3 counters, 4 originals, 5 epoch, 6 rescore (with a job)
-- ARGV: 1 epoch, 2 number of items,
--       then per item: rollout id, payload, packed change (log.py), '1' if this is its first known reward,
--       '2' if the bytes stay because they are damaged, and only the change is stored;
--       then, with a job, its JSON
-- Returns 'superseded', or one character per item: 's' it is stored now, 'g' the rollout is gone.
local OFFSET_STATUS = 21
local OUTCOMES = {[0] = 'scored', [1] = 'pending', [2] = 'failed'}
if (redis.call('GET', KEYS[5]) or '0') ~= ARGV[1] then return 'superseded' end
local num_items = tonumber(ARGV[2])

local function digits(number) return string.format('%.0f', number) end

local replies, changes, new, old = {}, {}, {}, {}
for i = 1, num_items do
  local at = 2 + (i - 1) * 4
  local stored = redis.call('HGET', KEYS[1], ARGV[at + 1])
  replies[i] = stored and 's' or 'g'
  if stored and (stored ~= ARGV[at + 2] or ARGV[at + 4] == '2') then
    changes[#changes + 1], new[#new + 1], old[#old + 1] = ARGV[at + 3], at, stored
  end
end

-- the log entry comes first: if Redis refuses to write, it refuses here, and nothing is half done
if #new > 0 then
  local position = digits(tonumber(redis.call('HGET', KEYS[3], 'log_position') or '0') + 1)
  redis.call('XADD', KEYS[2], position .. '-0', 's', table.concat(changes))
  redis.call('HSET', KEYS[3], 'log_position', position)
  local counts, num_first = {}, 0
  for i, at in ipairs(new) do
    -- a late copy of the push is compared with what was pushed first, whatever it was replaced by since
    redis.call('HSETNX', KEYS[4], ARGV[at + 1], redis.sha1hex(old[i]))
    redis.call('HSET', KEYS[1], ARGV[at + 1], ARGV[at + 2])
    local outcome = OUTCOMES[string.byte(ARGV[at + 3], OFFSET_STATUS)]
    counts[outcome] = (counts[outcome] or 0) + 1
    if ARGV[at + 4] == '1' then num_first = num_first + 1 end
  end
  for outcome, number in pairs(counts) do
    redis.pcall('HINCRBY', KEYS[3], 'rescored:' .. outcome, digits(number)) -- pcall: a damaged count must not end this half way
  end
  if num_first > 0 then redis.call('HINCRBY', KEYS[3], 'scored_total', digits(num_first)) end
end
local job = ARGV[3 + num_items * 4]
if job then redis.call('SET', KEYS[6], job) end
return table.concat(replies)
