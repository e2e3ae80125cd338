-- Deleting what is too old. Finding it is a read, deleting it a short write that looks once more.

-- name: old_jobs
-- Never the newest job, as on SQLite, whose next id follows on it.
SELECT id, seq FROM (SELECT id, seq FROM ostler.jobs WHERE status = 'done' AND finished_at < :done AND id < (SELECT max(id) FROM ostler.jobs) ORDER BY finished_at LIMIT :limit) AS x
 UNION ALL
SELECT id, seq FROM (SELECT id, seq FROM ostler.jobs WHERE status = 'cancelled' AND finished_at < :done AND id < (SELECT max(id) FROM ostler.jobs) ORDER BY finished_at LIMIT :limit) AS x
 UNION ALL
SELECT id, seq FROM (SELECT id, seq FROM ostler.jobs WHERE status = 'failed' AND finished_at < :failed AND id < (SELECT max(id) FROM ostler.jobs) ORDER BY finished_at LIMIT :limit) AS x
 LIMIT :limit;

-- name: purge_jobs
-- A job that was retried in the meantime is live again, and stays.
DELETE FROM ostler.jobs WHERE id = ANY (ARRAY(SELECT v::bigint FROM jsonb_array_elements_text(:ids::jsonb) AS v)) AND finished_at IS NOT NULL
   AND status IN ('done', 'failed', 'cancelled') RETURNING id, queue, status, chain;

-- name: purge_events
DELETE FROM ostler.job_events WHERE job = ANY (ARRAY(SELECT v::bigint FROM jsonb_array_elements_text(:ids::jsonb) AS v));

-- name: purge_errors
DELETE FROM ostler.job_errors WHERE job = ANY (ARRAY(SELECT v::bigint FROM jsonb_array_elements_text(:ids::jsonb) AS v));

-- name: trim_events
DELETE FROM ostler.job_events WHERE job = :job AND seq IN (SELECT seq FROM ostler.job_events WHERE job = :job ORDER BY seq LIMIT :most)
RETURNING seq;

-- name: purge_steps
DELETE FROM ostler.steps WHERE chain = ANY (ARRAY(SELECT v::bigint FROM jsonb_array_elements_text(:chains::jsonb) AS v))
   AND NOT EXISTS (SELECT 1 FROM ostler.jobs WHERE jobs.chain = steps.chain);

-- name: purged_add
INSERT INTO ostler.purged (job) SELECT v::bigint FROM jsonb_array_elements_text(:ids::jsonb) AS v ON CONFLICT DO NOTHING;

-- name: purged
SELECT job FROM ostler.purged WHERE job > :after ORDER BY job LIMIT :limit;

-- name: purged_done
DELETE FROM ostler.purged WHERE job = ANY (ARRAY(SELECT v::bigint FROM jsonb_array_elements_text(:ids::jsonb) AS v));

-- name: old_uniques
SELECT u.key, CASE WHEN u.until IS NULL THEN coalesce(j.status NOT IN ('queued', 'processing'), true) ELSE u.until <= :now END AS dead
  FROM (SELECT key, job, until FROM ostler.uniques WHERE key > :after ORDER BY key LIMIT :limit) AS u LEFT JOIN ostler.jobs AS j ON j.id = u.job
 ORDER BY u.key;

-- name: purge_uniques
-- A key that somebody's open transaction takes anew is passed over.
DELETE FROM ostler.uniques WHERE key IN (
  SELECT u.key FROM ostler.uniques AS u WHERE u.key = ANY (ARRAY(SELECT v FROM jsonb_array_elements_text(:keys::jsonb) AS v))
     AND ((u.until IS NOT NULL AND u.until <= :now)
       OR (u.until IS NULL AND NOT EXISTS (SELECT 1 FROM ostler.jobs WHERE jobs.id = u.job AND status IN ('queued', 'processing'))))
     FOR UPDATE OF u SKIP LOCKED);

-- name: old_batches
SELECT id FROM ostler.batches WHERE finished_at < :before AND NOT EXISTS (SELECT 1 FROM ostler.jobs WHERE jobs.batch = batches.id) LIMIT :limit;

-- name: purge_batches
DELETE FROM ostler.batches WHERE id = ANY (ARRAY(SELECT v::bigint FROM jsonb_array_elements_text(:ids::jsonb) AS v)) AND finished_at IS NOT NULL
   AND NOT EXISTS (SELECT 1 FROM ostler.jobs WHERE jobs.batch = batches.id);

-- name: waits_too_long
SELECT id FROM ostler.jobs WHERE status = 'queued' AND later = 1 AND run_at > :now + wait_ms LIMIT 500;

-- name: wait_no_longer
UPDATE ostler.jobs SET run_at = :now + wait_ms
 WHERE id = ANY (ARRAY(SELECT v::bigint FROM jsonb_array_elements_text(:ids::jsonb) AS v)) AND status = 'queued' AND later = 1 AND run_at > :now + wait_ms;
