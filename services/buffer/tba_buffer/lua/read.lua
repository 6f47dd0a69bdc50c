-- Prelude of the scripts that read visits, leases, units and batches. One that is damaged fails alone: whoever asks for it is answered as
-- if it was not there, and GET /v1/run names it (unreadable.py).
local MOST_NOTED, LONGEST_NAME = 1000, 256 -- as in unreadable.py

local function note_damage(unreadable, kind, name)
  if redis.call('HLEN', unreadable) >= MOST_NOTED then return end
  redis.call('HSETNX', unreadable, kind .. ':' .. string.sub(name, 1, LONGEST_NAME),
    '{"detail":"what is stored is no ' .. kind .. '","found_at_s":' .. redis.call('TIME')[1] .. '}')
end

local function read(unreadable, kind, name, text, is_good)
  local is_json, value = pcall(cjson.decode, text)
  if is_json and type(value) == 'table' and is_good(value) then return value end
  note_damage(unreadable, kind, name)
end

local function is_lease(value)
  return type(value.s) == 'string' and (value.k == 'eval' and type(value.u) == 'string'
    or value.k == 'train' and type(value.v) == 'string')
end
local function read_lease(unreadable, lease_id, text) return read(unreadable, 'lease', lease_id, text, is_lease) end

-- What leases need of an evaluation; evals.py reads the rest.
local function is_eval(value)
  return type(value.state) == 'string' and type(value.deadline_s) == 'number' and type(value.version) == 'string'
end

local MOST_MISSING = 1000000
local function is_visit(value)
  local num = value.n
  return type(value.p) == 'string' and type(value.l) == 'string' and (value.h == nil or type(value.h) == 'table')
    and type(num) == 'number' and num == math.floor(num) and num >= 1 and num <= MOST_MISSING
end

-- A visit, or nil. One that is damaged is dropped with all others that are, and what is in flight is counted anew, since
-- nobody knows how much of it was theirs.
local function read_visit(visits, counters, unreadable, visit_id)
  local text = redis.call('HGET', visits, visit_id)
  if not text then return end
  local visit = read(unreadable, 'visit', visit_id, text, is_visit)
  if visit then return visit end
  local inflight, every = 0, redis.call('HGETALL', visits)
  for i = 1, #every, 2 do
    local other = read(unreadable, 'visit', every[i], every[i + 1], is_visit)
    if not other then
      redis.call('HDEL', visits, every[i])
    elseif other.l ~= '' then
      inflight = inflight + other.n
    end
  end
  redis.call('HSET', counters, 'inflight', inflight)
end
