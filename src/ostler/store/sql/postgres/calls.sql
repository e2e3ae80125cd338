-- The log of calls that have ended.

-- name: add_calls
-- Written twice, a row is the same row.
INSERT INTO ostler.calls (id, node, request, task, model, worker, asked_at, waited_ms, took_ms, bytes_in, bytes_out, status, outcome, code, streamed, host_mb, gpu_mb)
SELECT (row ->> 0)::bigint, row ->> 1, row ->> 2, row ->> 3, row ->> 4, row ->> 5, (row ->> 6)::bigint, (row ->> 7)::float8, (row ->> 8)::float8, (row ->> 9)::bigint, (row ->> 10)::bigint, (row ->> 11)::int, row ->> 12, row ->> 13, (row ->> 14)::int, (row ->> 15)::float8, (row ->> 16)::float8
  FROM jsonb_array_elements(:rows::jsonb) AS row
ON CONFLICT DO NOTHING;

-- name: calls
SELECT id, node, request, task, model, worker, asked_at, waited_ms, took_ms, bytes_in, bytes_out, status, outcome, code, streamed, host_mb, gpu_mb
  FROM ostler.calls WHERE {where} ORDER BY id DESC, node DESC LIMIT :limit;

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
SELECT id FROM ostler.calls ORDER BY id DESC LIMIT 1 OFFSET :kept;

-- name: purge_calls
DELETE FROM ostler.calls WHERE (id, node) IN (SELECT id, node FROM ostler.calls WHERE id <= :until ORDER BY id LIMIT :most) RETURNING id;
