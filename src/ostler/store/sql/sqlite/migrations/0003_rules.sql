-- From here on migrations only add, so that a node also runs on a schema one release newer.

-- Order is by position, not by id: a job that is requeued at the end of its queue gets a new one. NULL means its id.
ALTER TABLE jobs ADD COLUMN position INTEGER;
-- 1: it waits behind another job of its queue and limit key, and is not in the ready index. See limits.py.
ALTER TABLE jobs ADD COLUMN behind INTEGER NOT NULL DEFAULT 0;
ALTER TABLE jobs ADD COLUMN held INTEGER NOT NULL DEFAULT 0;     -- how often a run asked for leave to publish
ALTER TABLE jobs ADD COLUMN wait_ms INTEGER;                     -- how long a retry or snooze waits, where run_at comes from that
-- The chain that it is a step of (the id of the first step's job), and the number of the step. `next` is of older rows.
ALTER TABLE jobs ADD COLUMN chain INTEGER;
ALTER TABLE jobs ADD COLUMN step INTEGER;

DROP INDEX jobs_ready;
CREATE INDEX jobs_ready ON jobs (queue, priority DESC, coalesce(position, id), id)
 WHERE status = 'queued' AND later = 0 AND behind = 0;
CREATE INDEX jobs_waiting ON jobs (queue, limit_key, priority DESC, coalesce(position, id), id)
 WHERE status = 'queued' AND later = 0 AND limit_key IS NOT NULL;
CREATE INDEX jobs_heads ON jobs (queue, limit_key)
 WHERE status = 'queued' AND later = 0 AND behind = 0 AND limit_key IS NOT NULL;
CREATE INDEX jobs_over  ON jobs (status, finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX jobs_chain ON jobs (chain) WHERE chain IS NOT NULL;

UPDATE jobs SET behind = 1 WHERE limit_key IS NOT NULL AND status IN ('queued', 'processing');
UPDATE jobs SET behind = 0
 WHERE id IN (SELECT id FROM (SELECT id, row_number() OVER (PARTITION BY queue, limit_key ORDER BY priority DESC, id) AS place
                                FROM jobs WHERE status = 'queued' AND later = 0 AND limit_key IS NOT NULL) WHERE place = 1);

-- The steps of a chain that follow its first job, each stored once.
CREATE TABLE steps (
  chain INTEGER NOT NULL,
  n     INTEGER NOT NULL,
  step  TEXT NOT NULL,
  PRIMARY KEY (chain, n)
) STRICT, WITHOUT ROWID;

-- Jobs whose rows are deleted and whose logs and artifacts are not yet: written with the delete, worked off by upkeep.
CREATE TABLE purged (job INTEGER PRIMARY KEY) STRICT;

-- How many jobs of each queue are queued, scheduled, processing, failed and cancelled, written in the transaction that changes
-- them. There is one writer at a time, so one row is enough; where several nodes write at once it is split into a row per node,
-- and readers add them up.
CREATE TABLE depths (
  queue  TEXT NOT NULL,
  status TEXT NOT NULL,
  n      INTEGER NOT NULL,
  PRIMARY KEY (queue, status)
) STRICT, WITHOUT ROWID;

INSERT INTO depths (queue, status, n)
SELECT queue, 'queued', count(*) FROM jobs WHERE status = 'queued' AND later = 0 GROUP BY queue
 UNION ALL SELECT queue, 'scheduled', count(*) FROM jobs WHERE status = 'queued' AND later = 1 GROUP BY queue
 UNION ALL SELECT queue, status, count(*) FROM jobs WHERE status IN ('processing', 'failed', 'cancelled') GROUP BY queue, status;

-- What a worker was doing is its tenant's to name: 'job:7'.
ALTER TABLE exits ADD COLUMN item TEXT;
UPDATE exits SET item = 'job:' || job WHERE job IS NOT NULL;
ALTER TABLE exits DROP COLUMN job;

-- What a slot that was opened on demand is for; its number, and so its history, stays with the key.
ALTER TABLE health ADD COLUMN key TEXT;
