-- Replace the checkpoint of the log by one that was written in pieces, and cut what it replaces from the log.
-- KEYS: 1 checkpoint of the log, 2 log, 3 epoch, then the new pieces, then the pieces of the checkpoint before
-- ARGV: 1 epoch, 2 generation, 3 position, 4 number of new pieces, 5 bytes in them, 6 publications (JSON),
--       7 generation before, '' if none, 8 how many of the new pieces are of the draws; they come first
-- Returns 'superseded', 'stale' (nothing is changed: pieces are gone, or another checkpoint came first) or 'ok'.
if redis.call('GET', KEYS[3]) ~= ARGV[1] then return 'superseded' end
local current = redis.call('HGET', KEYS[1], 'generation') or ''
if current == ARGV[2] then return 'ok' end
local last_new, num_bytes = 3 + tonumber(ARGV[4]), 0
for i = 4, last_new do num_bytes = num_bytes + redis.call('STRLEN', KEYS[i]) end
if current ~= ARGV[7] or num_bytes ~= tonumber(ARGV[5]) then return 'stale' end
for i = 4, last_new do redis.call('PERSIST', KEYS[i]) end
redis.call('HSET', KEYS[1], 'generation', ARGV[2], 'position', ARGV[3], 'num_pieces', ARGV[4], 'num_draw_pieces',
  ARGV[8], 'marks', ARGV[6])
-- the entry at the position itself stays: it tells a reader that this is still the log it has read
redis.call('XTRIM', KEYS[2], 'MINID', ARGV[3] .. '-0')
for i = last_new + 1, #KEYS do redis.call('UNLINK', KEYS[i]) end
return 'ok'
