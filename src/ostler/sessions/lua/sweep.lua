-- The reaper: workers of nodes that are known to be dead, and (unless `stale` is negative) those whose heartbeat is older than `stale`
-- seconds or gone, go with their sessions: [field, about, seconds since the heartbeat, rows].
local now, found, seen, dead = tonumber(call('TIME')[1]), {}, {}, {}
for _, node in ipairs(given.dead) do dead[node] = true end
for _, key in ipairs({LIFETIME, ACTIVE, WORKERS}) do
  for _, field in ipairs(call('HKEYS', key)) do
    local last = tonumber(call('HGET', worker(field), 'lastHeartbeat'))
    local about = call('HGET', WORKERS, field)
    local is_stale = given.stale >= 0 and (not last or now - last > given.stale)
    if not seen[field] and (is_stale or (about and dead[cjson.decode(about)[1]])) then
      seen[field] = true
      found[#found + 1] = {field, about or '', last and now - last or -1, call('HVALS', rows(field))}
      remove(field, string.match(field, ':(.*)$') or '')
    end
  end
end
return found
