-- Statements of the live state: counters over time, incidents, and what has changed.

-- name: tally
-- In one order, so that two who meet in a part wait for each other and do not lock each other out.
INSERT INTO ostler.tallies AS t (step, at, queue, name, part, n)
SELECT (row ->> 0)::int, (row ->> 1)::bigint, row ->> 2, row ->> 3, pg_backend_pid() % 64, (row ->> 4)::bigint
  FROM jsonb_array_elements(:rows::jsonb) AS row ORDER BY 1, 2, 3, 4
ON CONFLICT (step, at, queue, name, part) DO UPDATE SET n = t.n + excluded.n;

-- name: totals
SELECT queue, name, sum(n)::bigint AS n FROM ostler.tallies WHERE step = 0 GROUP BY queue, name;

-- name: newest_tallies
SELECT queue, at, name, sum(n)::bigint AS n FROM ostler.tallies
 WHERE step = :step AND at = (SELECT max(at) FROM ostler.tallies WHERE step = :step AND at <= :now) GROUP BY queue, at, name;

-- name: sum_tallies
SELECT queue, name, sum(n)::bigint AS n FROM ostler.tallies WHERE step = :step AND at >= :since AND at <= :now AND name IN ('done', 'run_ms')
 GROUP BY queue, name;

-- name: series
SELECT at - at % :width AS at, name, sum(n)::bigint AS n FROM ostler.tallies
 WHERE step = :step AND at >= :since AND (:until::bigint IS NULL OR at <= :until) AND (:queue::text IS NULL OR queue = :queue) GROUP BY 1, 2 ORDER BY 1;

-- name: purge_tallies
-- No more than a short transaction can take: the oldest buckets first.
DELETE FROM ostler.tallies
 WHERE step = :step AND at < :before AND at < (SELECT min(at) FROM ostler.tallies WHERE step = :step) + 20 * :step RETURNING 1;

-- name: put_incident
INSERT INTO ostler.incidents (node, id, level, subject, text, count, at, job, detail)
VALUES (:node, :id, :level, :subject, :text, :count, :at, :job, :detail)
ON CONFLICT (node, id) DO UPDATE SET level = excluded.level, text = excluded.text, count = excluded.count, at = excluded.at,
       job = excluded.job, detail = excluded.detail;

-- name: incidents
SELECT node, id, level, subject, text, count, at, job, detail FROM ostler.incidents
 WHERE (:before::bigint IS NULL OR id < :before) ORDER BY id DESC LIMIT :limit;

-- name: purge_incidents
DELETE FROM ostler.incidents WHERE at < :before;

-- name: running_since
SELECT queue, started_at FROM ostler.jobs WHERE status = 'processing' LIMIT 5000;

-- name: newest_ids
SELECT id FROM ostler.jobs WHERE id > :after ORDER BY id DESC LIMIT :limit;

-- name: processing_ids
SELECT id FROM ostler.jobs WHERE status = 'processing' ORDER BY id DESC LIMIT :limit;

-- name: fold_depths
-- Only one folds at a time, and only what it deleted.
WITH gone AS (DELETE FROM ostler.depths RETURNING queue, status, n)
INSERT INTO ostler.depths (queue, status, n) SELECT queue, status, sum(n) FROM gone GROUP BY queue, status HAVING sum(n) <> 0;
