-- The rows of live sessions of all workers that are there, `most` of them.
local found = {}
for _, field in ipairs(call('HKEYS', WORKERS)) do
  if call('EXISTS', worker(field)) == 1 then
    for _, row in ipairs(call('HVALS', rows(field))) do
      if #found < given.most then found[#found + 1] = row end
    end
  end
end
return found
