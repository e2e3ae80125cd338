-- The filtered listing. A status stands in the SQL as text, so that the partial indexes serve.

-- name: list_jobs
SELECT id FROM ostler.jobs WHERE {where} ORDER BY id DESC LIMIT :limit;

-- name: match_jobs
SELECT id FROM ostler.jobs WHERE {where} ORDER BY id LIMIT :limit;

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
ostler.readable(error) ->> 'code' = :code

-- condition: of_batch
batch = :batch

-- condition: of_ids
id = ANY (ARRAY(SELECT v::bigint FROM jsonb_array_elements_text(:ids::jsonb) AS v))

-- condition: before
id < :cursor

-- condition: found
-- In any case of letters. `coded` is the text as JSON in ASCII has it.
id >= :floor AND (id::text = :search OR task ILIKE :like ESCAPE '\' OR args ILIKE :like ESCAPE '\'
  OR args ILIKE :coded ESCAPE '\' OR error ILIKE :like ESCAPE '\' OR error ILIKE :coded ESCAPE '\')

-- name: open_jobs
SELECT id FROM ostler.jobs WHERE id = ANY (ARRAY(SELECT v::bigint FROM jsonb_array_elements_text(:ids::jsonb) AS v)) AND status IN ('queued', 'processing');

-- name: chain_newest
SELECT id FROM ostler.jobs WHERE chain = :chain ORDER BY step DESC LIMIT 1;

-- name: batch_jobs
-- Of a chain, its first job.
SELECT id, chain FROM ostler.jobs WHERE batch = :batch AND id > :after AND (step IS NULL OR step = 0) ORDER BY id LIMIT :limit;

-- name: waiter_add
INSERT INTO ostler.waiters (job, until) VALUES (:job, :until)
    ON CONFLICT (job) DO UPDATE SET until = greatest(waiters.until, excluded.until);

-- name: waiters_old
-- In no order that others keep: what is locked is left to the next one.
DELETE FROM ostler.waiters WHERE job IN (SELECT job FROM ostler.waiters WHERE until < :now FOR UPDATE SKIP LOCKED);
