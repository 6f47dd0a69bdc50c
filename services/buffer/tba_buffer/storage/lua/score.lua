-- Store new rewards of stored rollouts, all or nothing: log the changes, replace the payloads, count, and store the
-- re-scoring job. A payload that is stored already is skipped, so a repeated call changes nothing (but kind 2 is logged
-- and counted again).
-- args: ids (of the rollouts, one after the other), changes (one per rollout, packed as in log.py), kinds (one per
--       rollout: 1, its first known reward; 2, its payload is damaged and stays, only the change is logged; else 0),
--       job (JSON; absent: none)
-- payloads: of the rollouts
-- Returns 'superseded', or one character per item: 's' it is stored now, 'g' the rollout is gone.
local ID_BYTES, CHANGE_BYTES = 16, 21 -- the last byte of a change is the status
local OUTCOMES = {[0] = 'scored', [1] = 'pending', [2] = 'failed'}
local FIRST_REWARD, DAMAGED = 1, 2
if is_superseded() then return 'superseded' end
local payloads, counters = key('payloads'), key('counters')

local function id_of(i) return string.sub(args.ids, (i - 1) * ID_BYTES + 1, i * ID_BYTES) end
local function change_of(i) return string.sub(args.changes, (i - 1) * CHANGE_BYTES + 1, i * CHANGE_BYTES) end

local replies, changes, new, old = {}, {}, {}, {}
for i = 1, #ARGV - 1 do
  local id = id_of(i)
  local stored = redis.call('HGET', payloads, id)
  replies[i] = stored and 's' or 'g'
  if stored and (stored ~= ARGV[i + 1] or args.kinds[i] == DAMAGED) then
    changes[#changes + 1], new[#new + 1], old[#old + 1] = change_of(i), i, stored
  end
end

-- the log entry comes first: if Redis refuses to write, it refuses here, and nothing is half done
if #new > 0 then
  append(next_position(), 's', table.concat(changes))
  local counts, num_first = {}, 0
  for at, i in ipairs(new) do
    -- a late copy of the push is compared with what was pushed first, whatever it was replaced by since
    redis.call('HSETNX', key('originals'), id_of(i), redis.sha1hex(old[at]))
    redis.call('HSET', payloads, id_of(i), ARGV[i + 1])
    local outcome = OUTCOMES[string.byte(changes[at], CHANGE_BYTES)]
    counts[outcome] = (counts[outcome] or 0) + 1
    if args.kinds[i] == FIRST_REWARD then num_first = num_first + 1 end
  end
  for outcome, number in pairs(counts) do
    redis.pcall('HINCRBY', counters, 'rescored:' .. outcome, number) -- pcall: a damaged count must not end this half way
  end
  if num_first > 0 then redis.call('HINCRBY', counters, 'scored_total', num_first) end
end
if args.job then redis.call('SET', key('rescore'), args.job) end
return table.concat(replies)
