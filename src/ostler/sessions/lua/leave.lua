-- These workers are no more. workers: [field, id].
for _, w in ipairs(given.workers) do remove(w[1], w[2]) end
return #given.workers
