-- Workers with all that they have, as their node knows it: registers, and puts back what was lost. workers: [field, id, fields of the
-- hash in pairs, rows in pairs, served, wanted, about]. Answers with what is wanted of each and its sessions in all.
local now, said = call('TIME')[1], {}
for n, w in ipairs(given.workers) do
  local field = w[1]
  local before = call('HGET', worker(field), 'wanted') or w[6]
  for i = 1, #w[3], 2 do call('HSET', worker(field), w[3][i], w[3][i + 1]) end
  call('HSET', worker(field), 'lastHeartbeat', now, 'wanted', before)
  call('PEXPIRE', worker(field), given.ttl)
  call('DEL', rows(field))
  for i = 1, #w[4], 2 do call('HSET', rows(field), w[4][i], w[4][i + 1]) end
  local served = math.max(tonumber(call('HGET', LIFETIME, field)) or 0, w[5])
  call('HSET', LIFETIME, field, served)
  call('HSET', WORKERS, field, w[7])
  count(field)
  said[n] = {wanted(field, w[2]), served}
end
return said
