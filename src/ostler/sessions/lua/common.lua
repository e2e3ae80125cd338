-- The keys. Those under worker: and cluster: are for people with redis-cli, too; a worker's field there is {browser}:{id}.
--   worker:{field}               hash with a TTL: the worker, as its node told it last. `turn` numbers the node's writes
--   worker:cmd:{id}              'shutdown', set by hand: the worker drains
--   cluster:active_connections   hash: field -> live sessions, always counted from the rows below
--   cluster:lifetime_connections hash: field -> sessions in all
--   ostler:workers               hash: field -> [node, pool, component, generation], until it leaves or is reaped
--   ostler:rows:{field}          hash: session -> its row as JSON. These are the slots in use
--   ostler:orders:{node}         set: sessions that somebody asked to end        ostler:bell:{node}   list: wakes the node
--   ostler:secret                string: what the nodes of this registry know each other by
-- All scripts take one JSON argument. None of them searches the key space; only end, list, live and sweep look at more than they are told.
local given = cjson.decode(ARGV[1])
local call = redis.call
local ACTIVE, LIFETIME, WORKERS = 'cluster:active_connections', 'cluster:lifetime_connections', 'ostler:workers'

local function worker(field) return 'worker:' .. field end
local function rows(field) return 'ostler:rows:' .. field end

local function count(field)
  call('HSET', ACTIVE, field, call('HLEN', rows(field)))
end

-- Whether the server has what the node last wrote of this worker. It has not after a restart, FLUSHALL, an expiry or a lost answer.
local function is_stale(field, turn, live, served)
  return call('HGET', worker(field), 'turn') ~= turn or call('HLEN', rows(field)) ~= live
    or (tonumber(call('HGET', LIFETIME, field)) or -1) < served or call('HEXISTS', WORKERS, field) == 0
end

-- A command set by hand becomes wanted state, which does not expire.
local function wanted(field, id)
  if call('GET', 'worker:cmd:' .. id) == 'shutdown' then call('HSET', worker(field), 'wanted', 'drain') end
  return call('HGET', worker(field), 'wanted') or 'serve'
end

local function remove(field, id)
  call('DEL', worker(field), 'worker:cmd:' .. id, rows(field))
  call('HDEL', ACTIVE, field)
  call('HDEL', LIFETIME, field)
  call('HDEL', WORKERS, field)
end

local function ring(node)
  call('LPUSH', 'ostler:bell:' .. node, '1')
  call('EXPIRE', 'ostler:bell:' .. node, 60)
end
