-- The workers are there. workers: [field, id, turn, live, served, status, rows that changed in pairs]. Answers with what is wanted of
-- each, or 'stale' where it must be restored.
local now, said = call('TIME')[1], {}
for n, w in ipairs(given.workers) do
  local field = w[1]
  if is_stale(field, w[3], w[4], w[5]) then
    said[n] = 'stale'
  else
    call('HSET', worker(field), 'lastHeartbeat', now, 'status', w[6])
    call('PEXPIRE', worker(field), given.ttl)
    for i = 1, #w[7], 2 do call('HSET', rows(field), w[7][i], w[7][i + 1]) end
    said[n] = wanted(field, w[2])
  end
end
return said
