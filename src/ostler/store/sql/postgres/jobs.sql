-- Statements about jobs. Batches travel as one JSON array, so that a batch is one step of SQLite and not one per row.
-- A write about a claimed job names (id, fence) and finds it 'processing', or changes nothing.
-- Where ids are named, the status is compared as `status || ''`: written plainly it fits a partial index, which the planner takes for
-- tiny on a new table and reads as a whole.

-- name: enqueue
-- The fields of NewJob in their order, and now. Rows get their ids in the order of the array.
INSERT INTO ostler.jobs (task, queue, args, attempts, timeout, priority, run_at, backoff, limit_key, limit_max, batch, unique_key, chain, step,
                  later, behind, seq, created_at)
SELECT row ->> 0, row ->> 1, row ->> 2, (row ->> 3)::int, (row ->> 4)::float8, (row ->> 5)::int, (row ->> 6)::bigint, row ->> 7, row ->> 8,
       (row ->> 9)::int, (row ->> 10)::bigint, row ->> 12, (row ->> 14)::bigint, (row ->> 15)::int,
       coalesce((row ->> 6)::bigint > (row ->> 16)::bigint, false)::int, (row ->> 8 IS NOT NULL)::int, 1, (row ->> 16)::bigint
  FROM jsonb_array_elements(:rows::jsonb) WITH ORDINALITY AS r (row, place) ORDER BY place
RETURNING id;

-- own: enqueue_alone
-- `enqueue` of one job that nothing else belongs to, counted, and whoever waits for it woken: a transaction of its own in one trip.
WITH stored AS (
INSERT INTO ostler.jobs (task, queue, args, attempts, timeout, priority, run_at, backoff, limit_key, limit_max, batch, unique_key, chain, step,
                  later, behind, seq, created_at)
SELECT row ->> 0, row ->> 1, row ->> 2, (row ->> 3)::int, (row ->> 4)::float8, (row ->> 5)::int, (row ->> 6)::bigint, row ->> 7, row ->> 8,
       (row ->> 9)::int, (row ->> 10)::bigint, row ->> 12, (row ->> 14)::bigint, (row ->> 15)::int,
       coalesce((row ->> 6)::bigint > (row ->> 16)::bigint, false)::int, (row ->> 8 IS NOT NULL)::int, 1, (row ->> 16)::bigint
  FROM jsonb_array_elements(:rows::jsonb) WITH ORDINALITY AS r (row, place) ORDER BY place
RETURNING id, queue, later),
counted AS (
INSERT INTO ostler.depths (queue, status, n) SELECT queue, CASE later WHEN 1 THEN 'scheduled' ELSE 'queued' END, 1 FROM stored)
SELECT id, (SELECT pg_notify(:channel, '') WHERE EXISTS (SELECT 1 FROM ostler.nodes AS n WHERE n.waits::jsonb ? stored.queue)) FROM stored;

-- name: add_events
INSERT INTO ostler.job_events (job, seq, at, name, data)
SELECT (row ->> 0)::bigint, (row ->> 1)::int, (row ->> 2)::bigint, row ->> 3, row ->> 4 FROM jsonb_array_elements(:rows::jsonb) AS row;

-- name: add_errors
INSERT INTO ostler.job_errors (job, seq, at, node, data)
SELECT (row ->> 0)::bigint, (row ->> 1)::int, (row ->> 2)::bigint, row ->> 3, row ->> 4 FROM jsonb_array_elements(:rows::jsonb) AS row;

-- name: errors_old
-- All but the newest ones of a job.
DELETE FROM ostler.job_errors WHERE job = :job
   AND seq <= (SELECT seq FROM ostler.job_errors WHERE job = :job ORDER BY seq DESC LIMIT 1 OFFSET :kept);

-- name: errors
SELECT seq, at, node, data FROM ostler.job_errors WHERE job = :job ORDER BY seq DESC LIMIT :limit;

-- name: promote
-- No more at a time than a short transaction can take; the rest is due at once, too.
UPDATE ostler.jobs SET later = 0
 WHERE id IN (SELECT id FROM ostler.jobs WHERE status = 'queued' AND later = 1 AND run_at <= :now ORDER BY run_at LIMIT 2000 FOR UPDATE SKIP LOCKED)
RETURNING queue, limit_key;

-- name: claimable
-- (rank, low): where to begin, see frontier.py. The index holds -priority, because a comparison of rows has one direction.
SELECT id, task, queue, args, attempts, attempt, crashes, excused, fence, timeout, backoff, limit_key, limit_max, priority,
       coalesce(position, id) AS place, greatest(coalesce(run_at, 0), created_at) AS since FROM ostler.jobs
 WHERE status = 'queued' AND later = 0 AND behind = 0 AND queue = :queue
   AND (-priority, coalesce(position, id)) >= (:rank::int, :low::bigint)
   AND (limit_key IS NULL OR limit_key <> ALL (ARRAY(SELECT v FROM jsonb_array_elements_text(:full::jsonb) AS v)))
   AND (:tasks::text IS NULL OR task = ANY (ARRAY(SELECT v FROM jsonb_array_elements_text(:tasks::jsonb) AS v)))
 ORDER BY -priority, coalesce(position, id), id LIMIT :limit FOR UPDATE SKIP LOCKED;

-- name: waiting_by_key
-- The jobs that wait behind the first one of their queue and key.
SELECT id, task, queue, args, attempts, attempt, crashes, excused, fence, timeout, backoff, limit_key, limit_max, priority,
       coalesce(position, id) AS place, greatest(coalesce(run_at, 0), created_at) AS since FROM ostler.jobs
 WHERE status = 'queued' AND later = 0 AND queue = :queue AND limit_key = :key AND behind = 1
   AND (:tasks::text IS NULL OR task = ANY (ARRAY(SELECT v FROM jsonb_array_elements_text(:tasks::jsonb) AS v)))
 ORDER BY -priority, coalesce(position, id), id LIMIT :limit FOR UPDATE SKIP LOCKED;

-- name: demote_heads
UPDATE ostler.jobs SET behind = 1
 WHERE id IN (SELECT h.id FROM jsonb_array_elements(:batch::jsonb) AS k JOIN ostler.jobs AS h ON h.queue = k ->> 0 AND h.limit_key = k ->> 1
               WHERE h.status = 'queued' AND h.later = 0 AND h.behind = 0 AND h.limit_key IS NOT NULL
                 AND h.id <> (SELECT f.id FROM ostler.jobs AS f
                               WHERE f.queue = h.queue AND f.limit_key = h.limit_key AND f.status = 'queued' AND f.later = 0
                               ORDER BY -f.priority, coalesce(f.position, f.id), f.id LIMIT 1));

-- name: promote_heads
UPDATE ostler.jobs SET behind = 0
 WHERE behind = 1
   AND id IN (SELECT (SELECT f.id FROM ostler.jobs AS f
                       WHERE f.queue = k ->> 0 AND f.limit_key = k ->> 1 AND f.status = 'queued' AND f.later = 0
                       ORDER BY -f.priority, coalesce(f.position, f.id), f.id LIMIT 1) FROM jsonb_array_elements(:batch::jsonb) AS k);

-- name: claim
-- The row is also the claim's event `processing`.
UPDATE ostler.jobs SET status = 'processing', attempt = attempt + 1, fence = fence + 1, seq = seq + 1, node = :node,
       worker = c.worker, started_at = :now, claimed_at = :now, claim_seq = seq + 1, progress = NULL, stage = NULL
  FROM (SELECT e.key::bigint AS id, e.value AS worker FROM jsonb_each_text(:batch::jsonb) AS e) AS c
 WHERE jobs.id = c.id AND jobs.status || '' = 'queued'
RETURNING jobs.id;

-- own: turn_alone
-- A turn that has nothing to write and claims from queues without limits, as a transaction of its own in one trip: what node_turn,
-- claimable, claim, depth_add, tally and node_waits do, in their order. Where it takes more than that nothing is written and no row comes
-- back: the node does not live, this turn is not new, a scheduled job is due, a job with a limit key was met. Else there is a row for
-- each claim, or one without. `wants` has [queue, rank, low, free places, [worker, …]] for each queue, with the workers of as many places as
-- are to be filled now; `reads` [queue, seconds, priority, place] of its first job, if any.
WITH mine AS (
SELECT id FROM ostler.nodes
 WHERE id = :id AND turn < :turn AND status IN ('starting', 'healthy', 'stopping')
   AND NOT EXISTS (SELECT 1 FROM ostler.jobs WHERE status = 'queued' AND later = 1 AND run_at <= :now) FOR NO KEY UPDATE),
wanted AS (
SELECT w ->> 0 AS queue, (w ->> 1)::int AS rank, (w ->> 2)::bigint AS low, (w ->> 3)::int AS many,
       w -> 4 AS workers, jsonb_array_length(w -> 4) AS most, clock_timestamp() AS began
  FROM mine, jsonb_array_elements(:wants::jsonb) AS w),
picked AS (
SELECT wanted.queue, wanted.workers -> (j.n - 1)::int AS worker, extract(epoch FROM clock_timestamp() - wanted.began)::float8 AS took, j.*
  FROM wanted LEFT JOIN LATERAL (SELECT row_number() OVER () AS n, r.* FROM (
       SELECT id, limit_key, priority, coalesce(position, id) AS place FROM ostler.jobs
        WHERE status = 'queued' AND later = 0 AND behind = 0 AND queue = wanted.queue
          AND (-priority, coalesce(position, id)) >= (wanted.rank, wanted.low)
          AND (:tasks::text IS NULL OR task = ANY (ARRAY(SELECT v FROM jsonb_array_elements_text(:tasks::jsonb) AS v)))
        ORDER BY -priority, coalesce(position, id), id LIMIT wanted.most FOR UPDATE SKIP LOCKED) AS r) AS j ON true),
node AS (
UPDATE ostler.nodes SET turn = :turn, beat_at = :beat,
       waits = (SELECT coalesce(jsonb_agg(queue), '[]')::text FROM wanted
                 WHERE many > (SELECT count(id) FROM picked WHERE picked.queue = wanted.queue))
 WHERE id = (SELECT id FROM mine) AND NOT EXISTS (SELECT 1 FROM picked WHERE limit_key IS NOT NULL)
RETURNING (SELECT min(run_at) FROM ostler.jobs WHERE status = 'queued' AND later = 1) AS due),
claimed AS (
UPDATE ostler.jobs SET status = 'processing', attempt = attempt + 1, fence = fence + 1, seq = seq + 1, node = :id,
       worker = p.workers ->> jobs.id::text, started_at = :now, claimed_at = :now, claim_seq = seq + 1, progress = NULL, stage = NULL
  FROM node, (SELECT jsonb_object_agg(id, worker) AS workers FROM picked WHERE id IS NOT NULL) AS p
 WHERE jobs.id = ANY (ARRAY(SELECT id FROM picked WHERE id IS NOT NULL)) AND jobs.status || '' = 'queued'
RETURNING jobs.id, fence, worker, task, queue, args, attempt, excused, attempts, crashes, timeout, backoff, priority,
          coalesce(position, jobs.id) AS place, greatest(coalesce(run_at, 0), created_at) AS since),
moved AS (
INSERT INTO ostler.depths (queue, status, n)
SELECT queue, state, change * count(*) FROM claimed, (VALUES ('queued', -1), ('processing', 1)) AS s (state, change) GROUP BY queue, state, change),
counted AS (
INSERT INTO ostler.tallies AS t (step, at, queue, name, part, n)
SELECT step, :now / 1000 - :now / 1000 % step, queue, 'wait:' || width_bucket(:now - since - 1, :bounds::bigint[]), pg_backend_pid() % 64, count(*)
  FROM claimed, (VALUES (10), (600)) AS s (step) WHERE attempt = 1 GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
ON CONFLICT (step, at, queue, name, part) DO UPDATE SET n = t.n + excluded.n)
SELECT c.id, c.fence, c.worker, c.task, c.queue, c.args, c.attempt - c.excused AS attempt, c.attempts, c.crashes, c.timeout, c.backoff,
       c.priority, c.place, node.due,
       (SELECT jsonb_agg(jsonb_build_array(queue, took, priority, place)) FROM picked WHERE n IS NULL OR n = 1) AS reads
  FROM node LEFT JOIN claimed AS c ON true;

-- name: finish_done
-- `finish` for most jobs, which are done and have nothing else to say. A row that is done is also the event `done`.
UPDATE ostler.jobs SET status = 'done', result = f.result, error = NULL, started_at = f.started_at, finished_at = f.finished_at,
       seq = seq + 1, cancel = 0
  FROM (SELECT (e ->> 0)::bigint AS id, (e ->> 1)::int AS fence, e ->> 2 AS result,
               (e ->> 3)::bigint AS started_at, (e ->> 4)::bigint AS finished_at
          FROM jsonb_array_elements(:batch::jsonb) AS e) AS f
 WHERE jobs.id = f.id AND jobs.fence = f.fence AND jobs.status || '' = 'processing'
RETURNING jobs.id, jobs.seq, jobs.queue, jobs.status, jobs.batch, jobs.next, jobs.chain, jobs.step, jobs.result,
          EXISTS (SELECT 1 FROM ostler.waiters AS w WHERE w.job = jobs.id) AS awaited;

-- name: finish
UPDATE ostler.jobs SET status = f.status, result = f.result, error = f.error, started_at = f.started_at, finished_at = f.finished_at,
       progress = coalesce(f.progress, jobs.progress), crashes = crashes + f.crash, seq = seq + 1, cancel = 0
  FROM (SELECT (e ->> 0)::bigint AS id, (e ->> 1)::int AS fence, e ->> 2 AS status, e ->> 3 AS result, e ->> 4 AS error,
               (e ->> 5)::bigint AS started_at, (e ->> 6)::bigint AS finished_at, (e ->> 7)::int AS crash, (e ->> 8)::float8 AS progress
          FROM jsonb_array_elements(:batch::jsonb) AS e) AS f
 WHERE jobs.id = f.id AND jobs.fence = f.fence AND jobs.status || '' = 'processing'
RETURNING jobs.id, jobs.seq, jobs.queue, jobs.status, jobs.batch, jobs.next, jobs.chain, jobs.step, jobs.result,
          EXISTS (SELECT 1 FROM ostler.waiters AS w WHERE w.job = jobs.id) AS awaited;

-- name: requeue
-- A job that somebody asked to cancel in the meantime does not go back: it ends here. `last` sends it behind everything that
-- is stored now, and ahead of what is stored later.
UPDATE ostler.jobs SET status = CASE WHEN cancel = 1 THEN 'cancelled' ELSE 'queued' END,
       finished_at = CASE WHEN cancel = 1 THEN :now::bigint ELSE NULL END,
       later = coalesce(r.run_at > :now, false)::int, behind = (limit_key IS NOT NULL)::int, run_at = coalesce(r.run_at, jobs.run_at),
       wait_ms = CASE WHEN r.run_at > :now THEN r.run_at - :now::bigint END,
       attempt = attempt - r.refund, crashes = crashes + r.crash, excused = jobs.excused + r.excused,
       error = CASE WHEN cancel = 1 THEN json_build_object('code', 'CANCELLED', 'message', 'cancelled; its run had ended already')::text
                    ELSE coalesce(r.error, jobs.error) END,
       position = CASE WHEN r.last = 1 THEN (SELECT max(id) FROM ostler.jobs) + 1 ELSE jobs.position END,
       node = NULL, worker = NULL, started_at = NULL, claimed_at = NULL, claim_seq = NULL, cancel = 0, seq = seq + 1
  FROM (SELECT (e ->> 0)::bigint AS id, (e ->> 1)::int AS fence, (e ->> 2)::bigint AS run_at, (e ->> 3)::int AS refund, (e ->> 4)::int AS crash,
               (e ->> 5)::int AS excused, e ->> 6 AS error, (e ->> 7)::int AS last
          FROM jsonb_array_elements(:batch::jsonb) AS e) AS r
 WHERE jobs.id = r.id AND jobs.fence = r.fence AND jobs.status || '' = 'processing'
RETURNING jobs.id, jobs.seq, jobs.queue, jobs.status, jobs.later, jobs.batch, jobs.limit_key;

-- name: note
-- Progress and named events of running jobs: several per job in one batch, in order.
UPDATE ostler.jobs SET seq = seq + n.count, progress = coalesce(n.progress, jobs.progress), stage = coalesce(n.stage, jobs.stage)
  FROM (SELECT (e ->> 0)::bigint AS id, (e ->> 1)::int AS fence, (e ->> 2)::int AS count, (e ->> 3)::float8 AS progress, e ->> 4 AS stage
          FROM jsonb_array_elements(:batch::jsonb) AS e) AS n
 WHERE jobs.id = n.id AND jobs.fence = n.fence AND jobs.status || '' = 'processing'
RETURNING jobs.id, jobs.seq, jobs.fence;

-- name: hold
-- It changes the row on purpose: a commit that changes nothing is not synced.
UPDATE ostler.jobs SET held = held + 1 WHERE id = :id AND fence = :fence AND status = 'processing' AND cancel = 0 RETURNING id;

-- name: claims_of
SELECT id, fence, worker, task, queue, args, attempt - excused AS attempt, attempts, crashes, timeout, backoff FROM ostler.jobs
 WHERE status = 'processing' AND node = :node;

-- name: node_waits
UPDATE ostler.nodes SET waits = :waits WHERE id = :id;

-- name: orphaned
-- Claims of a node that is known to be dead.
SELECT id, fence, worker, attempt - excused AS attempt FROM ostler.jobs WHERE status = 'processing' AND node = :node;

-- name: standing
-- The ready index has one job for each limit key that waits, so that is how many come before it.
SELECT j.task, j.queue, j.status, j.later, j.run_at, j.limit_key, j.limit_max,
       (SELECT count(*) FROM (SELECT 1 FROM ostler.jobs b WHERE b.status = 'queued' AND b.later = 0 AND b.behind = 0
           AND b.queue = j.queue AND b.priority > j.priority LIMIT :most) AS x) AS higher,
       (SELECT count(*) FROM (SELECT 1 FROM ostler.jobs b WHERE b.status = 'queued' AND b.later = 0 AND b.behind = 0
           AND b.queue = j.queue AND b.priority = j.priority
           AND (coalesce(b.position, b.id), b.id) < (coalesce(j.position, j.id), j.id) LIMIT :most) AS x) AS earlier,
       (SELECT count(*) FROM ostler.jobs r WHERE r.status = 'processing' AND r.limit_key IS NOT NULL AND r.limit_key = j.limit_key) AS running_key,
       (SELECT count(*) FROM ostler.jobs r WHERE r.status = 'processing' AND r.queue = j.queue) AS running_queue
  FROM ostler.jobs j WHERE j.id = :id;

-- name: any_ready
SELECT EXISTS (SELECT 1 FROM ostler.jobs WHERE status = 'queued' AND later = 0 AND behind = 0
                  AND queue = ANY (ARRAY(SELECT v FROM jsonb_array_elements_text(:queues::jsonb) AS v))) AS ready;

-- name: needed_queues
SELECT k.queue FROM jsonb_array_elements_text(:queues::jsonb) AS k (queue)
 WHERE EXISTS (SELECT 1 FROM ostler.jobs j WHERE j.status = 'queued' AND j.later = 0 AND j.behind = 0 AND j.queue = k.queue)
    OR EXISTS (SELECT 1 FROM ostler.jobs j WHERE j.status = 'queued' AND j.later = 1 AND j.run_at <= :now AND j.queue = k.queue);

-- name: next_due
SELECT min(run_at) AS due FROM ostler.jobs WHERE status = 'queued' AND later = 1;

-- name: wanted_cancels
SELECT id, fence FROM ostler.jobs WHERE status = 'processing' AND node = :node AND cancel = 1;

-- name: cancel_queued
UPDATE ostler.jobs SET status = 'cancelled', finished_at = :now, seq = seq + 1,
       error = json_build_object('code', 'CANCELLED', 'message', 'cancelled before it began')::text
 WHERE id = :id AND status = 'queued' RETURNING id, seq, queue, status, later, batch, limit_key;

-- name: cancel_running
UPDATE ostler.jobs SET cancel = 1, seq = seq + 1 WHERE id = :id AND status = 'processing' AND cancel = 0 RETURNING id, seq;

-- name: retry
-- The budget starts anew: every run so far is excused. The timeline and the errors of all runs stay.
UPDATE ostler.jobs SET status = 'queued', later = 0, run_at = NULL, wait_ms = NULL, excused = attempt, crashes = 0, cancel = 0, error = NULL, result = NULL,
       position = NULL, behind = (limit_key IS NOT NULL)::int, progress = NULL, stage = NULL, node = NULL, worker = NULL, started_at = NULL, claimed_at = NULL, claim_seq = NULL,
       finished_at = NULL, seq = seq + 1
 WHERE id = :id AND status IN ('failed', 'cancelled', 'done') RETURNING id, seq, queue, batch, limit_key;

-- name: job
SELECT * FROM ostler.jobs WHERE id = :id;

-- name: keep_events
-- What the rows of these jobs alone tell is stored, before they forget it. Twice is the same as once.
INSERT INTO ostler.job_events (job, seq, at, name, data)
SELECT id, claim_seq, claimed_at, 'processing', json_build_object('attempt', attempt - excused, 'worker', worker, 'node', node)::text FROM ostler.jobs
 WHERE id = ANY (ARRAY(SELECT v::bigint FROM jsonb_array_elements_text(:ids::jsonb) AS v)) AND claim_seq IS NOT NULL
 UNION ALL
SELECT id, seq, finished_at, 'done', NULL FROM ostler.jobs
 WHERE id = ANY (ARRAY(SELECT v::bigint FROM jsonb_array_elements_text(:ids::jsonb) AS v)) AND status = 'done'
ON CONFLICT DO NOTHING;

-- name: events_after
SELECT seq, at, name, data FROM ostler.timeline WHERE job = :id AND seq > :edge ORDER BY seq LIMIT :limit;

-- name: events_before
SELECT seq, at, name, data FROM ostler.timeline WHERE job = :id AND seq < :edge ORDER BY seq DESC LIMIT :limit;

-- name: short_jobs
-- Jobs as listings and the live state show them: large values are cut off here, not carried about. What is taken out of JSON
-- may be no text (a lone surrogate was escaped there), so it comes as bytes.
SELECT id, task, queue, status, substr(args, 1, 201) AS args, priority, attempt, attempts, crashes, excused, timeout, progress,
       substr(stage, 1, 201) AS stage, worker, node, cancel, run_at, batch, unique_key, created_at, started_at, finished_at, seq,
       substr(ostler.readable(error) ->> 'code', 1, 201) AS code,
       substr(ostler.readable(error) ->> 'message', 1, 201) AS message, substr(result, 1, 201) AS result
  FROM ostler.jobs WHERE id = ANY (ARRAY(SELECT v::bigint FROM jsonb_array_elements_text(:ids::jsonb) AS v)) ORDER BY id;

-- name: depths
SELECT queue, status, sum(n)::bigint AS n FROM ostler.depths GROUP BY queue, status HAVING sum(n) <> 0;

-- name: depth_add
INSERT INTO ostler.depths (queue, status, n)
SELECT row ->> 0, row ->> 1, (row ->> 2)::bigint FROM jsonb_array_elements(:rows::jsonb) AS row;

-- name: oldest_ready
-- The first job in line of each priority, and of those the oldest: a few steps in the index, however many wait.
WITH RECURSIVE line (queue, rank, n) AS (
  SELECT d.queue, (SELECT min(-priority) FROM ostler.jobs WHERE status = 'queued' AND later = 0 AND behind = 0 AND queue = d.queue), 1
    FROM (SELECT DISTINCT queue FROM ostler.depths WHERE status = 'queued') AS d
   UNION ALL
  SELECT l.queue, (SELECT min(-priority) FROM ostler.jobs
                    WHERE status = 'queued' AND later = 0 AND behind = 0 AND queue = l.queue AND -priority > l.rank), n + 1
    FROM line AS l WHERE l.rank IS NOT NULL AND n < 100)
SELECT queue, min((SELECT created_at FROM ostler.jobs
                    WHERE status = 'queued' AND later = 0 AND behind = 0 AND queue = line.queue AND -priority = line.rank
                    ORDER BY coalesce(position, id), id LIMIT 1)) AS at
  FROM line WHERE rank IS NOT NULL GROUP BY queue;

-- name: live_jobs
SELECT id FROM ostler.jobs WHERE id = ANY (ARRAY(SELECT v::bigint FROM jsonb_array_elements_text(:ids::jsonb) AS v))
   AND (status = 'processing' OR (status = 'queued' AND attempt > 0));

-- name: count_jobs
SELECT queue, status, count(*) AS n FROM ostler.jobs GROUP BY queue, status;
