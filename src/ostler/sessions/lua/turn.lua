-- Releases, then admissions, or nothing at all. known: [field, turn, next turn, live, served]; ended: [session, field];
-- asked: [session, field, id, row]. Answers with the fields that must be restored first, and the verdicts.
local stale, verdicts = {}, {}
for _, k in ipairs(given.known) do
  if is_stale(k[1], k[2], k[4], k[5]) then stale[#stale + 1] = k[1] end
end
if #stale > 0 then return {stale, verdicts} end

for _, one in ipairs(given.ended) do call('HDEL', rows(one[2]), one[1]) end

local function admit(session, field, id, row)
  if call('HEXISTS', rows(field), session) == 1 then return 'ok' end
  local is = call('HMGET', worker(field), 'status', 'slots', 'lifetime')
  if is[1] ~= 'available' or wanted(field, id) ~= 'serve' then return 'draining' end
  local lifetime = tonumber(is[3])
  if lifetime > 0 and tonumber(call('HGET', LIFETIME, field)) >= lifetime then return 'lifetime' end
  if call('HLEN', rows(field)) >= tonumber(is[2]) then return 'full' end
  call('HSET', rows(field), session, row)
  call('HINCRBY', LIFETIME, field, 1)
  return 'ok'
end

for n, one in ipairs(given.asked) do verdicts[n] = admit(one[1], one[2], one[3], one[4]) end
for _, k in ipairs(given.known) do
  call('HSET', worker(k[1]), 'turn', k[3])
  count(k[1])
end
return {stale, verdicts}
