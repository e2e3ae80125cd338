-- All workers that are there: [their hash, live sessions, sessions in all].
local found = {}
for _, field in ipairs(call('HKEYS', WORKERS)) do
  local hash = call('HGETALL', worker(field))
  if #hash > 0 then found[#found + 1] = {hash, call('HLEN', rows(field)), call('HGET', LIFETIME, field)} end
end
return found
