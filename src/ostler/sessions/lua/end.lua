-- Somebody asks the node of this session to end it.
for _, field in ipairs(call('HKEYS', WORKERS)) do
  local node = call('HEXISTS', rows(field), given.session) == 1 and call('HGET', worker(field), 'node')
  if node then
    call('SADD', 'ostler:orders:' .. node, given.session)
    call('EXPIRE', 'ostler:orders:' .. node, 3600)
    ring(node)
    return 1
  end
end
return 0
