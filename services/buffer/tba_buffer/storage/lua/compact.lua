-- Make a checkpoint of the log, whose pieces are written already, the current one. Trim the log up to its position, and
-- delete the pieces of the checkpoint before.
-- args: generation, position, num_pieces, num_draw_pieces (the first ones, which hold the draws), num_bytes (of all
--       pieces), publications (JSON), generation_before and num_pieces_before (0: there was no checkpoint)
-- Returns 'superseded', 'stale' (nothing is changed: pieces are gone, or another checkpoint came first) or 'ok'.
if is_superseded() then return 'superseded' end
local function piece(generation, number) return key('base:' .. digits(generation) .. ':' .. number) end
local current = redis.call('HGET', key('base'), 'generation') or '0'
if current == digits(args.generation) then return 'ok' end
local num_bytes = 0
for i = 0, args.num_pieces - 1 do num_bytes = num_bytes + redis.call('STRLEN', piece(args.generation, i)) end
if current ~= digits(args.generation_before) or num_bytes ~= args.num_bytes then return 'stale' end
for i = 0, args.num_pieces - 1 do redis.call('PERSIST', piece(args.generation, i)) end
redis.call('HSET', key('base'), 'generation', args.generation, 'position', digits(args.position), 'num_pieces',
  args.num_pieces, 'num_draw_pieces', args.num_draw_pieces, 'marks', args.publications)
-- the entry at the position itself stays: it tells a reader that this is still the log it has read
redis.call('XTRIM', key('log'), 'MINID', digits(args.position) .. '-0')
for i = 0, args.num_pieces_before - 1 do redis.call('UNLINK', piece(args.generation_before, i)) end
return 'ok'
