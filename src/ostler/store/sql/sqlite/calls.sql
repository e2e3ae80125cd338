-- The log of calls that have ended.

-- name: add_calls
-- Written twice, a row is the same row.
INSERT INTO calls (id, node, request, task, model, worker, asked_at, waited_ms, took_ms, bytes_in, bytes_out, status, outcome, code, streamed, host_mb, gpu_mb)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT DO NOTHING;

-- name: calls
SELECT id, node, request, task, model, worker, asked_at, waited_ms, took_ms, bytes_in, bytes_out, status, outcome, code, streamed, host_mb, gpu_mb
  FROM calls WHERE {where} ORDER BY id DESC, node DESC LIMIT :limit;

-- condition: call_before
(id, node) < (:id, :node)

-- condition: call_task
task = :task

-- condition: call_model
model = :model

-- condition: call_outcome
outcome = :outcome

-- condition: call_request
request = :request

-- name: calls_beyond
-- The newest of those that are too many.
SELECT id FROM calls ORDER BY id DESC LIMIT 1 OFFSET :kept;

-- name: purge_calls
DELETE FROM calls WHERE (id, node) IN (SELECT id, node FROM calls WHERE id <= :until ORDER BY id LIMIT :most) RETURNING id;
