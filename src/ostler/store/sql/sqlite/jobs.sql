-- Statements about jobs. Batches travel as one JSON array, so that a batch is one step of SQLite and not one per row.
-- A write about a claimed job names (id, fence) and finds it 'processing', or changes nothing.

-- name: enqueue
-- ?1 to ?16 are the fields of NewJob in their order, ?17 is now. A new field gets a number here and a column, and that is all.
INSERT INTO jobs (task, queue, args, attempts, timeout, priority, run_at, backoff, limit_key, limit_max, batch, unique_key, chain, step,
                  later, behind, seq, created_at)
VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?13, ?15, ?16,
        coalesce(?7 > ?17, 0), ?9 IS NOT NULL, 1, ?17);

-- name: add_events
-- No rows come back, so plain values row by row are quicker here than JSON.
INSERT INTO job_events (job, seq, at, name, data) VALUES (?, ?, ?, ?, ?);

-- name: add_errors
INSERT INTO job_errors (job, seq, at, node, data) VALUES (?, ?, ?, ?, ?);

-- name: errors_old
-- All but the newest ones of a job.
DELETE FROM job_errors WHERE job = :job
   AND seq <= (SELECT seq FROM job_errors WHERE job = :job ORDER BY seq DESC LIMIT 1 OFFSET :kept);

-- name: errors
SELECT seq, at, node, data FROM job_errors WHERE job = :job ORDER BY seq DESC LIMIT :limit;

-- name: promote
-- No more at a time than a short transaction can take; the rest is due at once, too.
UPDATE jobs SET later = 0
 WHERE id IN (SELECT id FROM jobs WHERE status = 'queued' AND later = 1 AND run_at <= :now ORDER BY run_at LIMIT 2000)
RETURNING queue, limit_key;

-- name: claimable
SELECT id, task, queue, args, attempts, attempt, crashes, excused, fence, timeout, backoff, limit_key, limit_max, priority,
       coalesce(position, id) AS place, max(coalesce(run_at, 0), created_at) AS since FROM jobs
 WHERE status = 'queued' AND later = 0 AND queue = :queue
   AND behind = 0 AND (limit_key IS NULL OR limit_key NOT IN (SELECT value FROM json_each(:full)))
   AND (:tasks IS NULL OR task IN (SELECT value FROM json_each(:tasks))) AND (-priority, coalesce(position, id)) >= (:rank, :low)
 ORDER BY priority DESC, coalesce(position, id), id LIMIT :limit;

-- name: waiting_by_key
-- The jobs that wait behind the first one of their queue and key.
SELECT id, task, queue, args, attempts, attempt, crashes, excused, fence, timeout, backoff, limit_key, limit_max, priority,
       coalesce(position, id) AS place, max(coalesce(run_at, 0), created_at) AS since FROM jobs
 WHERE status = 'queued' AND later = 0 AND queue = :queue AND limit_key = :key AND behind = 1
   AND (:tasks IS NULL OR task IN (SELECT value FROM json_each(:tasks)))
 ORDER BY priority DESC, coalesce(position, id), id LIMIT :limit;

-- name: demote_heads
UPDATE jobs SET behind = 1
 WHERE id IN (SELECT h.id FROM json_each(:batch) AS k JOIN jobs AS h INDEXED BY jobs_heads
                  ON h.queue = json_extract(k.value, '$[0]') AND h.limit_key = json_extract(k.value, '$[1]')
               WHERE h.status = 'queued' AND h.later = 0 AND h.behind = 0 AND h.limit_key IS NOT NULL
                 AND h.id <> (SELECT f.id FROM jobs AS f
                               WHERE f.queue = h.queue AND f.limit_key = h.limit_key AND f.status = 'queued' AND f.later = 0
                               ORDER BY f.priority DESC, coalesce(f.position, f.id), f.id LIMIT 1));

-- name: promote_heads
UPDATE jobs SET behind = 0
 WHERE behind = 1
   AND id IN (SELECT (SELECT f.id FROM jobs AS f
                       WHERE f.queue = json_extract(k.value, '$[0]') AND f.limit_key = json_extract(k.value, '$[1]')
                         AND f.status = 'queued' AND f.later = 0
                       ORDER BY f.priority DESC, coalesce(f.position, f.id), f.id LIMIT 1) FROM json_each(:batch) AS k);

-- name: claim
-- The row is also the claim's event `processing`. All of them were picked in the same transaction, so nothing comes back.
UPDATE jobs SET status = 'processing', attempt = attempt + 1, fence = fence + 1, seq = seq + 1, node = :node,
       worker = c.worker, started_at = :now, claimed_at = :now, claim_seq = seq + 1, progress = NULL, stage = NULL
  FROM (SELECT CAST(key AS INTEGER) AS id, value AS worker FROM json_each(:batch)) AS c
 WHERE jobs.id = c.id AND jobs.status = 'queued';

-- name: finish_done
-- `finish` for most jobs, which are done and have nothing else to say: a third cheaper. A row that is done is also the event `done`.
UPDATE jobs SET status = 'done', result = f.result, error = NULL, started_at = f.started_at, finished_at = f.finished_at,
       seq = seq + 1, cancel = 0
  FROM (SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS fence, json_extract(value, '$[2]') AS result,
               json_extract(value, '$[3]') AS started_at, json_extract(value, '$[4]') AS finished_at
          FROM json_each(:batch)) AS f
 WHERE jobs.id = f.id AND jobs.fence = f.fence AND jobs.status = 'processing'
RETURNING jobs.id, jobs.seq, jobs.queue, jobs.status, jobs.batch, jobs.next, jobs.chain, jobs.step, jobs.result, 0 AS awaited;

-- name: finish
-- `awaited`: somebody is to be told; here nobody is.
UPDATE jobs SET status = f.status, result = f.result, error = f.error, started_at = f.started_at, finished_at = f.finished_at,
       progress = coalesce(f.progress, jobs.progress), crashes = crashes + f.crash, seq = seq + 1, cancel = 0
  FROM (SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS fence, json_extract(value, '$[2]') AS status,
               json_extract(value, '$[3]') AS result, json_extract(value, '$[4]') AS error,
               json_extract(value, '$[5]') AS started_at, json_extract(value, '$[6]') AS finished_at,
               json_extract(value, '$[7]') AS crash, json_extract(value, '$[8]') AS progress
          FROM json_each(:batch)) AS f
 WHERE jobs.id = f.id AND jobs.fence = f.fence AND jobs.status = 'processing'
RETURNING jobs.id, jobs.seq, jobs.queue, jobs.status, jobs.batch, jobs.next, jobs.chain, jobs.step, jobs.result, 0 AS awaited;

-- name: requeue
-- A job that somebody asked to cancel in the meantime does not go back: it ends here. `last` sends it behind everything that
-- is stored now, and ahead of what is stored later.
UPDATE jobs SET status = CASE WHEN cancel = 1 THEN 'cancelled' ELSE 'queued' END,
       finished_at = CASE WHEN cancel = 1 THEN :now ELSE NULL END,
       later = coalesce(r.run_at > :now, 0), behind = limit_key IS NOT NULL, run_at = coalesce(r.run_at, jobs.run_at),
       wait_ms = CASE WHEN r.run_at > :now THEN r.run_at - :now END,
       attempt = attempt - r.refund, crashes = crashes + r.crash, excused = jobs.excused + r.excused,
       error = CASE WHEN cancel = 1 THEN json_object('code', 'CANCELLED', 'message', 'cancelled; its run had ended already')
                    ELSE coalesce(r.error, jobs.error) END,
       position = CASE WHEN r.last = 1 THEN (SELECT max(id) FROM jobs) + 1 ELSE jobs.position END,
       node = NULL, worker = NULL, started_at = NULL, claimed_at = NULL, claim_seq = NULL, cancel = 0, seq = seq + 1
  FROM (SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS fence, json_extract(value, '$[2]') AS run_at,
               json_extract(value, '$[3]') AS refund, json_extract(value, '$[4]') AS crash,
               json_extract(value, '$[5]') AS excused, json_extract(value, '$[6]') AS error,
               json_extract(value, '$[7]') AS last
          FROM json_each(:batch)) AS r
 WHERE jobs.id = r.id AND jobs.fence = r.fence AND jobs.status = 'processing'
RETURNING jobs.id, jobs.seq, jobs.queue, jobs.status, jobs.later, jobs.batch, jobs.limit_key;

-- name: note
-- Progress and named events of running jobs: several per job in one batch, in order.
UPDATE jobs SET seq = seq + n.count, progress = coalesce(n.progress, jobs.progress), stage = coalesce(n.stage, jobs.stage)
  FROM (SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS fence, json_extract(value, '$[2]') AS count,
               json_extract(value, '$[3]') AS progress, json_extract(value, '$[4]') AS stage
          FROM json_each(:batch)) AS n
 WHERE jobs.id = n.id AND jobs.fence = n.fence AND jobs.status = 'processing'
RETURNING jobs.id, jobs.seq, jobs.fence;

-- name: hold
-- It changes the row on purpose: a commit that changes nothing is not synced.
UPDATE jobs SET held = held + 1 WHERE id = :id AND fence = :fence AND status = 'processing' AND cancel = 0 RETURNING id;

-- name: claims_of
SELECT id, fence, worker, task, queue, args, attempt - excused AS attempt, attempts, crashes, timeout, backoff FROM jobs
 WHERE status = 'processing' AND node = :node;

-- name: node_waits
UPDATE nodes SET waits = :waits WHERE id = :id;

-- name: orphaned
-- Claims of a node that is known to be dead.
SELECT id, fence, worker, attempt - excused AS attempt FROM jobs WHERE status = 'processing' AND node = :node;

-- name: standing
-- The ready index has one job for each limit key that waits, so that is how many come before it.
SELECT j.task, j.queue, j.status, j.later, j.run_at, j.limit_key, j.limit_max,
       (SELECT count(*) FROM (SELECT 1 FROM jobs b WHERE b.status = 'queued' AND b.later = 0 AND b.behind = 0
           AND b.queue = j.queue AND b.priority > j.priority LIMIT :most)) AS higher,
       (SELECT count(*) FROM (SELECT 1 FROM jobs b WHERE b.status = 'queued' AND b.later = 0 AND b.behind = 0
           AND b.queue = j.queue AND b.priority = j.priority
           AND (coalesce(b.position, b.id), b.id) < (coalesce(j.position, j.id), j.id) LIMIT :most)) AS earlier,
       (SELECT count(*) FROM jobs r WHERE r.status = 'processing' AND r.limit_key IS NOT NULL AND r.limit_key = j.limit_key) AS running_key,
       (SELECT count(*) FROM jobs r WHERE r.status = 'processing' AND r.queue = j.queue) AS running_queue
  FROM jobs j WHERE j.id = :id;

-- name: any_ready
SELECT EXISTS (SELECT 1 FROM jobs WHERE status = 'queued' AND later = 0 AND behind = 0
                  AND queue IN (SELECT value FROM json_each(:queues))) AS ready;

-- name: needed_queues
SELECT k.value AS queue FROM json_each(:queues) AS k
 WHERE EXISTS (SELECT 1 FROM jobs WHERE status = 'queued' AND later = 0 AND behind = 0 AND queue = k.value)
    OR EXISTS (SELECT 1 FROM jobs WHERE status = 'queued' AND later = 1 AND run_at <= :now AND queue = k.value);

-- name: next_due
SELECT min(run_at) AS due FROM jobs WHERE status = 'queued' AND later = 1;

-- name: wanted_cancels
SELECT id, fence FROM jobs WHERE status = 'processing' AND node = :node AND cancel = 1;

-- name: cancel_queued
UPDATE jobs SET status = 'cancelled', finished_at = :now, seq = seq + 1,
       error = json_object('code', 'CANCELLED', 'message', 'cancelled before it began')
 WHERE id = :id AND status = 'queued' RETURNING id, seq, queue, status, later, batch, limit_key;

-- name: cancel_running
UPDATE jobs SET cancel = 1, seq = seq + 1 WHERE id = :id AND status = 'processing' AND cancel = 0 RETURNING id, seq;

-- name: retry
-- The budget starts anew: every run so far is excused. The timeline and the errors of all runs stay.
UPDATE jobs SET status = 'queued', later = 0, run_at = NULL, wait_ms = NULL, excused = attempt, crashes = 0, cancel = 0, error = NULL, result = NULL,
       position = NULL, behind = limit_key IS NOT NULL, progress = NULL, stage = NULL, node = NULL, worker = NULL, started_at = NULL, claimed_at = NULL, claim_seq = NULL,
       finished_at = NULL, seq = seq + 1
 WHERE id = :id AND status IN ('failed', 'cancelled', 'done') RETURNING id, seq, queue, batch, limit_key;

-- name: job
SELECT * FROM jobs WHERE id = :id;

-- name: keep_events
-- What the rows of these jobs alone tell is stored, before they forget it. Twice is the same as once.
INSERT INTO job_events (job, seq, at, name, data)
SELECT id, claim_seq, claimed_at, 'processing', json_object('attempt', attempt - excused, 'worker', worker, 'node', node) FROM jobs
 WHERE id IN (SELECT value FROM json_each(:ids)) AND claim_seq IS NOT NULL
 UNION ALL
SELECT id, seq, finished_at, 'done', NULL FROM jobs
 WHERE id IN (SELECT value FROM json_each(:ids)) AND status = 'done'
ON CONFLICT DO NOTHING;

-- name: events_after
SELECT seq, at, name, data FROM timeline WHERE job = :id AND seq > :edge ORDER BY seq LIMIT :limit;

-- name: events_before
SELECT seq, at, name, data FROM timeline WHERE job = :id AND seq < :edge ORDER BY seq DESC LIMIT :limit;

-- name: short_jobs
-- Jobs as listings and the live state show them: large values are cut off here, not carried about. What is taken out of JSON
-- may be no text (a lone surrogate was escaped there), so it comes as bytes.
SELECT id, task, queue, status, substr(args, 1, 201) AS args, priority, attempt, attempts, crashes, excused, timeout, progress,
       substr(stage, 1, 201) AS stage, worker, node, cancel, run_at, batch, unique_key, created_at, started_at, finished_at, seq,
       CAST(substr(json_extract(error, '$.code'), 1, 201) AS BLOB) AS code,
       CAST(substr(json_extract(error, '$.message'), 1, 201) AS BLOB) AS message, substr(result, 1, 201) AS result
  FROM jobs WHERE id IN (SELECT value FROM json_each(:ids)) ORDER BY id;

-- name: depths
-- An enqueue does not count itself, which would cost it a page: `depths` holds all jobs up to the one that meta names, and those
-- after it, which nobody has touched yet, are added here.
SELECT queue, status, sum(n) AS n
  FROM (SELECT queue, status, n FROM depths
         UNION ALL
        SELECT queue, CASE later WHEN 1 THEN 'scheduled' ELSE 'queued' END, count(*) FROM jobs
         WHERE id > coalesce((SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'counted'), 0) GROUP BY 1, 2)
 GROUP BY queue, status HAVING sum(n) <> 0;

-- own: count_new
-- Before anything else happens to them.
INSERT INTO depths (queue, status, n)
SELECT queue, CASE later WHEN 1 THEN 'scheduled' ELSE 'queued' END, count(*) FROM jobs
 WHERE id > coalesce((SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'counted'), 0) GROUP BY 1, 2
ON CONFLICT (queue, status) DO UPDATE SET n = n + excluded.n RETURNING 1;

-- own: counted
INSERT INTO meta (key, value) SELECT 'counted', coalesce(max(id), 0) FROM jobs WHERE true
ON CONFLICT (key) DO UPDATE SET value = excluded.value;

-- own: depths_clear
DELETE FROM depths;

-- own: depths_fill
INSERT INTO depths (queue, status, n)
SELECT queue, 'queued', count(*) FROM jobs WHERE status = 'queued' AND later <> 1 GROUP BY queue
 UNION ALL SELECT queue, 'scheduled', count(*) FROM jobs WHERE status = 'queued' AND later = 1 GROUP BY queue
 UNION ALL SELECT queue, status, count(*) FROM jobs WHERE status IN ('processing', 'failed', 'cancelled') GROUP BY queue, status;

-- name: depth_add
INSERT INTO depths (queue, status, n) VALUES (?, ?, ?) ON CONFLICT (queue, status) DO UPDATE SET n = n + excluded.n;

-- name: oldest_ready
-- The first job in line of each priority, and of those the oldest: a few steps in the index, however many wait.
WITH RECURSIVE line (queue, priority, n) AS (
  SELECT d.queue, (SELECT max(priority) FROM jobs WHERE status = 'queued' AND later = 0 AND behind = 0 AND queue = d.queue), 1
    FROM (SELECT DISTINCT queue FROM depths
           UNION SELECT queue FROM jobs WHERE id > coalesce((SELECT CAST(value AS INTEGER) FROM meta WHERE key = 'counted'), 0)) AS d
   UNION ALL
  SELECT l.queue, (SELECT max(priority) FROM jobs
                    WHERE status = 'queued' AND later = 0 AND behind = 0 AND queue = l.queue AND priority < l.priority), n + 1
    FROM line AS l WHERE l.priority IS NOT NULL AND n < 100)
SELECT queue, min((SELECT created_at FROM jobs
                    WHERE status = 'queued' AND later = 0 AND behind = 0 AND queue = line.queue AND priority = line.priority
                    ORDER BY coalesce(position, id), id LIMIT 1)) AS at
  FROM line WHERE priority IS NOT NULL GROUP BY queue;

-- name: live_jobs
SELECT id FROM jobs WHERE id IN (SELECT value FROM json_each(:ids))
   AND (status = 'processing' OR (status = 'queued' AND attempt > 0));

-- name: count_jobs
SELECT queue, status, count(*) AS n FROM jobs GROUP BY queue, status;
