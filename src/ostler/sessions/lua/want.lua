-- Somebody asks a worker to drain, or to serve again.
local node = call('HGET', worker(given.field), 'node')
if not node then return 0 end
call('HSET', worker(given.field), 'wanted', given.wanted)
if given.wanted == 'serve' then
  call('DEL', 'worker:cmd:' .. given.id)
else
  call('SET', 'worker:cmd:' .. given.id, 'shutdown', 'PX', given.ttl)  -- for those who look; the wanted state does not expire
end
ring(node)
return 1
