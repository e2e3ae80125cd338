-- Uniqueness, limits, batches and chains.

-- name: unique_holder
SELECT u.job FROM uniques u LEFT JOIN jobs j ON j.id = u.job
 WHERE u.key = :key AND ((u.until IS NOT NULL AND u.until > :now) OR (u.until IS NULL AND j.status IN ('queued', 'processing')));

-- name: unique_set
INSERT INTO uniques (key, job, until) VALUES (:key, :job, :until)
ON CONFLICT (key) DO UPDATE SET job = excluded.job, until = excluded.until;

-- name: running_in_queue
SELECT count(*) AS n FROM jobs WHERE status = 'processing' AND queue = :queue;

-- name: running_by_key
SELECT limit_key, count(*) AS n, min(limit_max) AS most FROM jobs WHERE status = 'processing' AND limit_key IS NOT NULL GROUP BY limit_key;

-- name: running_of_key
SELECT count(*) AS n FROM jobs WHERE status = 'processing' AND limit_key = :key;

-- name: rate_get
SELECT tokens, at FROM rates WHERE queue = :queue;

-- name: rate_set
INSERT INTO rates (queue, tokens, at) VALUES (:queue, :tokens, :at)
ON CONFLICT (queue) DO UPDATE SET tokens = excluded.tokens, at = excluded.at;

-- name: chain_begin
-- The job is the first of a chain, which has its id.
UPDATE jobs SET chain = id, step = 0, next = NULL WHERE id = :id;

-- name: add_steps
INSERT INTO steps (chain, n, step) VALUES (?, ?, ?);

-- name: step
SELECT step FROM steps WHERE chain = :chain AND n = :n;

-- name: batch_new
INSERT INTO batches (total, pending, callback, created_at) VALUES (:total, :total, :callback, :now) RETURNING id;

-- name: batch_less
UPDATE batches SET pending = pending - :ended, failed = failed + :failed,
       finished_at = CASE WHEN pending - :ended <= 0 THEN :now ELSE NULL END
 WHERE id = :id RETURNING pending, failed, total, callback, callback_job;

-- name: batch_more
-- A job of the batch was put back by hand: it is pending again.
UPDATE batches SET pending = pending + 1, failed = max(0, failed - :failed), finished_at = NULL WHERE id = :id;

-- name: batch_called
UPDATE batches SET callback_job = :job WHERE id = :id;

-- name: batch
SELECT id, total, pending, failed, callback_job, created_at, finished_at FROM batches WHERE id = :id;

-- name: kin
SELECT id, chain, step, batch FROM jobs WHERE id = :id;

-- name: chain_jobs
SELECT id, step, task, status FROM jobs WHERE chain = :chain AND step BETWEEN :low AND :high ORDER BY step;

-- name: chain_steps
SELECT n, step FROM steps WHERE chain = :chain AND n BETWEEN :low AND :high ORDER BY n;

-- name: chain_length
SELECT max(n) AS n FROM steps WHERE chain = :chain;

-- name: batch_of_callback
SELECT id FROM batches WHERE callback_job = :job;
