-- The filtered listing. A status stands in the SQL as text, so that the partial indexes serve.

-- name: list_jobs
SELECT id FROM jobs WHERE {where} ORDER BY id DESC LIMIT :limit;

-- name: match_jobs
SELECT id FROM jobs WHERE {where} ORDER BY id LIMIT :limit;

-- condition: status_queued
status = 'queued'

-- condition: status_processing
status = 'processing'

-- condition: status_done
status = 'done'

-- condition: status_failed
status = 'failed'

-- condition: status_cancelled
status = 'cancelled'

-- condition: status_live
status IN ('queued', 'processing')

-- condition: of_queue
queue = :queue

-- condition: of_task
task = :task

-- condition: of_code
json_extract(error, '$.code') = :code

-- condition: of_batch
batch = :batch

-- condition: of_ids
id IN (SELECT value FROM json_each(:ids))

-- condition: before
id < :cursor

-- condition: found
-- In any case of ASCII letters. `coded` is the text as JSON in ASCII has it.
id >= :floor AND (CAST(id AS TEXT) = :search OR task LIKE :like ESCAPE '\' OR args LIKE :like ESCAPE '\'
  OR args LIKE :coded ESCAPE '\' OR error LIKE :like ESCAPE '\' OR error LIKE :coded ESCAPE '\')

-- name: open_jobs
SELECT id FROM jobs WHERE id IN (SELECT value FROM json_each(:ids)) AND status IN ('queued', 'processing');

-- name: chain_newest
SELECT id FROM jobs WHERE chain = :chain ORDER BY step DESC LIMIT 1;

-- name: batch_jobs
-- Of a chain, its first job.
SELECT id, chain FROM jobs WHERE batch = :batch AND id > :after AND (step IS NULL OR step = 0) ORDER BY id LIMIT :limit;

-- name: waiter_add
INSERT INTO waiters (job, until) VALUES (:job, :until) ON CONFLICT (job) DO UPDATE SET until = max(until, excluded.until);

-- name: waiters_old
DELETE FROM waiters WHERE until < :now;
