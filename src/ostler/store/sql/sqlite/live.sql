-- Statements of the live state: counters over time, incidents, and what has changed.

-- name: tally
INSERT INTO tallies (step, at, queue, name, n) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (step, at, queue, name) DO UPDATE SET n = n + excluded.n;

-- name: totals
SELECT queue, name, n FROM tallies WHERE step = 0;

-- name: newest_tallies
SELECT queue, at, name, n FROM tallies WHERE step = :step AND at = (SELECT max(at) FROM tallies WHERE step = :step AND at <= :now);

-- name: sum_tallies
SELECT queue, name, sum(n) AS n FROM tallies WHERE step = :step AND at >= :since AND at <= :now AND name IN ('done', 'run_ms')
 GROUP BY queue, name;

-- name: series
SELECT at - at % :width AS at, name, sum(n) AS n FROM tallies
 WHERE step = :step AND at >= :since AND (:until IS NULL OR at <= :until) AND (:queue IS NULL OR queue = :queue) GROUP BY 1, 2 ORDER BY 1;

-- name: purge_tallies
-- No more than a short transaction can take: the oldest buckets first.
DELETE FROM tallies
 WHERE step = :step AND at < :before AND at < (SELECT min(at) FROM tallies WHERE step = :step) + 20 * :step RETURNING 1;

-- name: put_incident
INSERT INTO incidents (node, id, level, subject, text, count, at, job, detail)
VALUES (:node, :id, :level, :subject, :text, :count, :at, :job, :detail)
ON CONFLICT (node, id) DO UPDATE SET level = excluded.level, text = excluded.text, count = excluded.count, at = excluded.at,
       job = excluded.job, detail = excluded.detail;

-- name: incidents
SELECT node, id, level, subject, text, count, at, job, detail FROM incidents
 WHERE (:before IS NULL OR id < :before) ORDER BY id DESC LIMIT :limit;

-- name: purge_incidents
DELETE FROM incidents WHERE at < :before;

-- name: running_since
SELECT queue, started_at FROM jobs WHERE status = 'processing' LIMIT 5000;

-- name: newest_ids
SELECT id FROM jobs WHERE id > :after ORDER BY id DESC LIMIT :limit;

-- name: processing_ids
SELECT id FROM jobs WHERE status = 'processing' ORDER BY id DESC LIMIT :limit;

-- name: fold_depths
-- One writer at a time: a row for each is all there ever is.
DELETE FROM depths WHERE n = 0;
