-- The reaper: workers whose heartbeat is older than `stale` seconds go, with their sessions: [field, about, last heartbeat, rows].
local now, found, seen = tonumber(call('TIME')[1]), {}, {}
for _, key in ipairs({LIFETIME, ACTIVE, WORKERS}) do
  for _, field in ipairs(call('HKEYS', key)) do
    local last = tonumber(call('HGET', worker(field), 'lastHeartbeat'))
    if not seen[field] and (not last or now - last > given.stale) then
      seen[field] = true
      found[#found + 1] = {field, call('HGET', WORKERS, field) or '', last and now - last or -1, call('HVALS', rows(field))}
      remove(field, string.match(field, ':(.*)$') or '')
    end
  end
end
return found
