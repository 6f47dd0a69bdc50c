-- Start a trainer: a new lineage and token, and a line of the ledger that says where it continues. Open batches of
-- older lineages become void. A request id that took a lineage before is answered with that lineage and its token, and
-- changes nothing, however late it comes. A registered checkpoint after the parent is replaced by the parent's, or by
-- none. A rollback that waits is done by the start that obeys it, and by one that goes back as far by itself: so the
-- checkpoint of one that waits is always in the history of the active lineage.
-- KEYS: 1 run, 2 lineages, 3 open_batches, 4 counters, 5 batches_since_publication, 6 open_steps, 7 ledger,
--       8 ledger_steps, 9 announced, 10 lineage_requests, 11 epoch, 12 run_changes, 13 log
-- ARGV: 1 token, 2 JSON of the lineage, 3 lineage of the parent, 4 step of the parent,
--       5 JSON of the ledger line, 'LINEAGE' in place of the new number, 6 request id,
--       7 epoch, 8 key of the parent's checkpoint, or '', 9 '1': the start is a rollback, 10 now_s,
--       11 "lineage-step ...", the history of the parent, 12 id of the request for a rollback that it obeys, or '',
--       13 '1': the trainer's process has trained the lineage before, so a stop or a failure that came meanwhile stays,
--       14 why the run fails in this call, or ''
-- Returns 'superseded', {'withdrawn'}, {'unknown-lineage'}, {'unknown-step'} or {'ok', lineage, token}.
-- A valid parent is the starting model, the start of its lineage, the result of an acked step, or an announced,
-- checkpointed or adopted version.
if redis.call('GET', KEYS[11]) ~= ARGV[7] then return 'superseded' end
local taken = redis.call('HGET', KEYS[10], ARGV[6])
if taken then
  local number, token = string.match(taken, '^(%d+) (.+)$')
  return {'ok', tonumber(number), token}
end
local request_id, asked_for = rollback_in(redis.call('HGET', KEYS[1], 'rollback'))
if ARGV[12] ~= '' and request_id ~= ARGV[12] then return {'withdrawn'} end
local parent = ARGV[3] .. '-' .. ARGV[4]
if parent ~= '0-0' then
  local text = redis.call('HGET', KEYS[2], ARGV[3])
  local is_read, lineage = pcall(cjson.decode, text or 'null') -- the start of a damaged one is unknown
  local start = is_read and type(lineage) == 'table' and string.match(tostring(lineage.parent), '%-(%d+)$')
  local known = redis.call('HMGET', KEYS[1], 'checkpoint', 'forked_from')
  if not text and known[2] ~= parent then return {'unknown-lineage'} end
  if start ~= ARGV[4] and known[1] ~= parent and known[2] ~= parent
      and redis.call('HEXISTS', KEYS[8], parent) == 0 and redis.call('HEXISTS', KEYS[9], parent) == 0 then
    return {'unknown-step'}
  end
end
-- draws that are not in the history give back what they took
if redis.call('HEXISTS', KEYS[4], 'draw_position') == 1 then append(KEYS[13], KEYS[4], next_position(KEYS[4]), 'l', ARGV[11]) end
local lineage = redis.call('HINCRBY', KEYS[1], 'lineage', 1)
redis.call('HSET', KEYS[2], lineage, ARGV[2])
redis.call('RPUSH', KEYS[7], (string.gsub(ARGV[5], '"LINEAGE"', tostring(lineage), 1)))
redis.call('HSET', KEYS[10], ARGV[6], lineage .. ' ' .. ARGV[1])
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'step', ARGV[4],
  'lineage_position', redis.call('HGET', KEYS[4], 'log_position') or '0')
local registered = redis.call('HGET', KEYS[1], 'checkpoint')
local registered_step = registered and tonumber(string.match(registered, '%-(%d+)$') or '')
if registered and (registered_step or math.huge) > tonumber(ARGV[4]) then -- nobody can resume from a damaged one
  if ARGV[8] == '' then
    redis.call('HDEL', KEYS[1], 'checkpoint', 'checkpoint_key')
  else
    redis.call('HSET', KEYS[1], 'checkpoint', parent, 'checkpoint_key', ARGV[8])
  end
end
if ARGV[9] == '1' then redis.pcall('HINCRBY', KEYS[1], 'rollbacks', 1) end
local state, fails = redis.call('HGET', KEYS[1], 'state') or 'running', ARGV[14] ~= ''
local stays = not fails and (state == 'paused' or ARGV[13] == '1' and (state == 'stopping' or state == 'failed'))
local new = fails and 'failed' or stays and state or 'running'
if not stays then redis.call('HSET', KEYS[1], 'state', new, 'reason', ARGV[14]) end
local obeys = request_id and request_id == ARGV[12]
local back_to = (obeys or asked_for and tonumber(ARGV[4]) <= tonumber(string.match(asked_for, '%d+$'))) and asked_for
if back_to then redis.call('HDEL', KEYS[1], 'rollback') end
if new ~= state or back_to then
  local why = fails and cjson.encode(ARGV[14]) or 'null'
  if back_to and back_to ~= parent and not fails then
    why = obeys and '"the checkpoint that was asked for is gone or damaged"'
      or '"an alarm, or a start of the trainer, went back further"'
  end
  local change = '{"number":' .. redis.call('LLEN', KEYS[12]) + 1 .. ',"at_s":' .. ARGV[10] .. ',"command":"'
    .. (fails and 'fail' or 'lineage') .. '","role":"trainer","reason":' .. why .. ',"old":"' .. state .. '","new":"' .. new
    .. '","lineage":' .. lineage .. ',"step":' .. ARGV[4] .. (back_to and ',"rollback":"' .. back_to .. '"}' or '}')
  redis.call('RPUSH', KEYS[12], change)
  if new ~= state then redis.call('HSET', KEYS[1], 'change', change) end
end
local num_rollouts = 0
for _, member in ipairs(redis.call('ZRANGE', KEYS[3], 0, -1)) do
  num_rollouts = num_rollouts + (tonumber(string.match(member, '^[^|]*|(%d+)|') or '') or 0)
  redis.call('SREM', KEYS[5], member)
end
if num_rollouts > 0 then redis.pcall('HINCRBY', KEYS[4], 'void', num_rollouts) end
redis.call('DEL', KEYS[3], KEYS[6])
return {'ok', lineage, ARGV[1]}
