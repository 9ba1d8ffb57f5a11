"""Scripts that run in Redis: one writes a batch as one step, the others take the ownership.

Redis does not undo a script: each script makes all checks before it writes anything.
"""

from typing import Final

STEP: Final = """
local p, n = KEYS[1], #ARGV
local owner = p .. 'owner'
if redis.call('HGET', owner, 'epoch') ~= ARGV[1] then return 'taken over' end
local i, last, unfinished = 5, {}, {}
while i <= n do
  if ARGV[i] == 'append' then
    local part, seq = ARGV[i+1], tonumber(ARGV[i+2])
    if not last[part] then last[part] = tonumber(redis.call('HGET', p .. 'part:' .. part, 'last') or '0') end
    if seq <= last[part] then return 'message ' .. ARGV[i+2] .. ' of partition ' .. part .. ' is there already' end
    last[part] = seq
    i = i + 5
  else i = i + 2 + tonumber(ARGV[i+1]) end
end
if ARGV[3] == 'check' then return 'trims' end
redis.call('HSET', owner, 'batch', ARGV[2])
local function forget(place, floor)
  redis.call('ZREMRANGEBYSCORE', p .. 'done:' .. place, '-inf', floor)
  for _, seq in ipairs(redis.call('ZRANGEBYSCORE', p .. 'due:' .. place, '-inf', floor)) do
    redis.call('HDEL', p .. 'state:' .. place, seq)
  end
  redis.call('ZREMRANGEBYSCORE', p .. 'due:' .. place, '-inf', floor)
end
local function drop(place)
  redis.call('DEL', p .. 'done:' .. place, p .. 'state:' .. place, p .. 'due:' .. place)
end
-- The number is there at once, the messages go as there is time. True: some are left.
local left = tonumber(ARGV[4])
local function trim(part, up_to)
  local log, key = p .. 'log:' .. part, p .. 'part:' .. part
  for _, name in ipairs({'last', 'trimmed'}) do
    if tonumber(up_to) > tonumber(redis.call('HGET', key, name) or '0') then redis.call('HSET', key, name, up_to) end
  end
  local items, size, start, name = 0, 0, '-', nil
  while items < left and size < 8388608 do
    local rows = redis.call('XRANGE', log, start, up_to, 'COUNT', 16)
    if #rows == 0 then break end
    for _, row in ipairs(rows) do items, size, name = items + 1, size + #row[2][4], row[1] end
    start = '(' .. name
  end
  left = left - items
  if name then
    redis.call('HINCRBY', key, 'bytes', string.format('%.0f', 0 - size))
    redis.call('XTRIM', log, 'MINID', string.format('%.0f', tonumber(string.match(name, '%d+')) + 1))
  end
  return #redis.call('XRANGE', log, '-', up_to, 'COUNT', 1) > 0
end
i = 5
while i <= n do
  local what = ARGV[i]
  if what == 'append' then
    local part, seq, meta, body = ARGV[i+1], ARGV[i+2], ARGV[i+3], ARGV[i+4]
    redis.call('XADD', p .. 'log:' .. part, seq .. '-1', 'm', meta, 'b', body)
    redis.call('HSET', p .. 'part:' .. part, 'last', seq)
    redis.call('HINCRBY', p .. 'part:' .. part, 'bytes', #body)
    i = i + 5
  else
    local a, b, c, d = ARGV[i+2], ARGV[i+3], ARGV[i+4], ARGV[i+5]
    if what == 'define' then redis.call('HSET', p .. 'definitions', a, b)
    elseif what == 'undefine' then redis.call('HDEL', p .. 'definitions', a)
    elseif what == 'cursor' then
      redis.call('HSET', p .. 'cursors:' .. b, a, c)
      redis.call('SADD', p .. 'places:' .. a, b)
    elseif what == 'stateless' then
      redis.call('HDEL', p .. 'state:' .. a, b)
      redis.call('ZREM', p .. 'due:' .. a, b)
    elseif what == 'state' then
      redis.call('HSET', p .. 'state:' .. a, b, c)
      redis.call('ZADD', p .. 'due:' .. a, b, b)
    elseif what == 'done' then redis.call('ZADD', p .. 'done:' .. a, b, c)
    elseif what == 'floor' then forget(a, b)
    elseif what == 'dead' then
      if tonumber(b) > tonumber(redis.call('HGET', p .. 'dead', a) or '0') then
        redis.call('XADD', p .. 'dead:' .. a, b .. '-1', 'r', c, 'm', d, 'b', ARGV[i+6], 'h', ARGV[i+7])
        redis.call('HSET', p .. 'dead', a, b)
      end
    elseif what == 'undead' then redis.call('XDEL', p .. 'dead:' .. a, b .. '-1')
    elseif what == 'trim' then
      if trim(a, b) then table.insert(unfinished, a) end
    elseif what == 'no partition' then
      for _, channel in ipairs(redis.call('HKEYS', p .. 'cursors:' .. a)) do
        drop(channel .. ':' .. a)
        redis.call('SREM', p .. 'places:' .. channel, a)
      end
      redis.call('UNLINK', p .. 'log:' .. a, p .. 'part:' .. a, p .. 'cursors:' .. a)
    elseif what == 'no channel' then
      for _, part in ipairs(redis.call('SMEMBERS', p .. 'places:' .. a)) do
        drop(a .. ':' .. part)
        redis.call('HDEL', p .. 'cursors:' .. part, a)
      end
      redis.call('UNLINK', p .. 'places:' .. a, p .. 'dead:' .. a)
      redis.call('HDEL', p .. 'dead', a)
    end
    i = i + 2 + tonumber(ARGV[i+1])
  end
end
return 'trims ' .. table.concat(unfinished, ' ')
"""
TAKE: Final = """
local before = redis.call('HGET', KEYS[1] .. 'owner', 'client') or ''
if before ~= ARGV[1] then return 0 end
redis.call('HSET', KEYS[1] .. 'owner', 'client', ARGV[2])
if ARGV[3] ~= '' then
  if redis.call('HGET', KEYS[1] .. 'owner', 'epoch') == ARGV[3] then return tonumber(ARGV[3]) else return 0 end
end
return redis.call('HINCRBY', KEYS[1] .. 'owner', 'epoch', 1)
"""
