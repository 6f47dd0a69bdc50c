-- Open batches past their deadline become void: their rollouts no longer count as drawn. An open batch of the asked
-- step is answered, so that a repeated request draws nothing twice, unless its deadline is too near: then it is void.
-- KEYS: 1 open_batches, 2 counters, 3 batches_since_mark
-- ARGV: 1 now_s, 2 "|lineage|step", 3 earliest deadline_s that is worth answering
-- Returns the member of the open batch for that step, or ''.
local open = ''
for _, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local deadline = tonumber(redis.call('ZSCORE', KEYS[1], member))
  local is_asked = string.sub(member, -#ARGV[2]) == ARGV[2]
  if deadline < tonumber(ARGV[1]) or (is_asked and deadline < tonumber(ARGV[3])) then
    redis.call('ZREM', KEYS[1], member)
    redis.call('HINCRBY', KEYS[2], 'void', string.match(member, '^[^|]*|(%d+)|'))
    redis.call('SREM', KEYS[3], member)
  elseif is_asked then
    open = member
  end
end
return open
