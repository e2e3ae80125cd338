-- Deleting what is too old. Finding it is a read, deleting it a short write that looks once more.

-- name: old_jobs
-- Never the newest job: the next one's id follows on it.
SELECT id, seq FROM (SELECT id, seq FROM jobs WHERE status = 'done' AND finished_at < :done AND id < (SELECT max(id) FROM jobs) ORDER BY finished_at LIMIT :limit)
 UNION ALL
SELECT id, seq FROM (SELECT id, seq FROM jobs WHERE status = 'cancelled' AND finished_at < :done AND id < (SELECT max(id) FROM jobs) ORDER BY finished_at LIMIT :limit)
 UNION ALL
SELECT id, seq FROM (SELECT id, seq FROM jobs WHERE status = 'failed' AND finished_at < :failed AND id < (SELECT max(id) FROM jobs) ORDER BY finished_at LIMIT :limit)
 LIMIT :limit;

-- name: purge_jobs
-- A job that was retried in the meantime is live again, and stays.
DELETE FROM jobs WHERE id IN (SELECT value FROM json_each(:ids)) AND finished_at IS NOT NULL
   AND status IN ('done', 'failed', 'cancelled') RETURNING id, queue, status, chain;

-- name: purge_events
DELETE FROM job_events WHERE job IN (SELECT value FROM json_each(:ids));

-- name: purge_errors
DELETE FROM job_errors WHERE job IN (SELECT value FROM json_each(:ids));

-- name: trim_events
DELETE FROM job_events WHERE job = :job AND seq IN (SELECT seq FROM job_events WHERE job = :job ORDER BY seq LIMIT :most)
RETURNING seq;

-- name: purge_steps
DELETE FROM steps WHERE chain IN (SELECT value FROM json_each(:chains))
   AND NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.chain = steps.chain);

-- name: purged_add
INSERT INTO purged (job) SELECT value FROM json_each(:ids) WHERE true ON CONFLICT DO NOTHING;

-- name: purged
SELECT job FROM purged WHERE job > :after ORDER BY job LIMIT :limit;

-- name: purged_done
DELETE FROM purged WHERE job IN (SELECT value FROM json_each(:ids));

-- name: old_uniques
SELECT u.key, CASE WHEN u.until IS NULL THEN coalesce(j.status NOT IN ('queued', 'processing'), 1) ELSE u.until <= :now END AS dead
  FROM (SELECT key, job, until FROM uniques WHERE key > :after ORDER BY key LIMIT :limit) AS u LEFT JOIN jobs AS j ON j.id = u.job
 ORDER BY u.key;

-- name: purge_uniques
DELETE FROM uniques WHERE key IN (SELECT value FROM json_each(:keys))
   AND ((until IS NOT NULL AND until <= :now)
     OR (until IS NULL AND NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.id = uniques.job AND status IN ('queued', 'processing'))));

-- name: old_batches
SELECT id FROM batches WHERE finished_at < :before AND NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.batch = batches.id) LIMIT :limit;

-- name: purge_batches
DELETE FROM batches WHERE id IN (SELECT value FROM json_each(:ids)) AND finished_at IS NOT NULL
   AND NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.batch = batches.id);

-- name: waits_too_long
SELECT id FROM jobs WHERE status = 'queued' AND later = 1 AND run_at > :now + wait_ms LIMIT 500;

-- name: wait_no_longer
UPDATE jobs SET run_at = :now + wait_ms
 WHERE id IN (SELECT value FROM json_each(:ids)) AND status = 'queued' AND later = 1 AND run_at > :now + wait_ms;
