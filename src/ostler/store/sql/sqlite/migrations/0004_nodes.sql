-- The row tells when its latest run was claimed. claim_seq is the number of that event in the timeline; NULL: the event is stored,
-- or the job was not claimed since it was last queued.
ALTER TABLE jobs ADD COLUMN claimed_at INTEGER;
ALTER TABLE jobs ADD COLUMN claim_seq INTEGER;

-- A job's row tells three of its events: `created`, `processing` of its latest run, and `done`. So a plain job has no row in
-- job_events. Where one is stored all the same, as older schemas did, that one counts. All parts have the same types, so that SQLite
-- reads a page of the view in order and stops at its end.
CREATE VIEW timeline (job, seq, at, name, data) AS
SELECT job, seq, at, name, data FROM job_events
 UNION ALL
SELECT id, CAST(1 AS INTEGER), created_at, CAST('created' AS TEXT), CAST(NULL AS TEXT) FROM jobs
 WHERE NOT EXISTS (SELECT 1 FROM job_events WHERE job = jobs.id AND seq = 1)
 UNION ALL
SELECT id, claim_seq, claimed_at, CAST('processing' AS TEXT), CAST(json_object('attempt', attempt, 'worker', worker, 'node', node) AS TEXT) FROM jobs
 WHERE claim_seq IS NOT NULL AND NOT EXISTS (SELECT 1 FROM job_events WHERE job = jobs.id AND seq = claim_seq)
 UNION ALL
SELECT id, seq, finished_at, CAST('done' AS TEXT), CAST(NULL AS TEXT) FROM jobs
 WHERE status = 'done' AND NOT EXISTS (SELECT 1 FROM job_events WHERE job = jobs.id AND seq = jobs.seq);

-- Jobs after this one are not in `depths` yet.
INSERT INTO meta (key, value) SELECT 'counted', coalesce(max(id), 0) FROM jobs WHERE true
ON CONFLICT (key) DO UPDATE SET value = excluded.value;

-- AUTOINCREMENT writes another page with each enqueue. Ids are never used twice all the same: the newest job stays when old ones are
-- deleted, so that the next id is always above all that were ever given. Here that may need a stand-in, which goes like any old job.
INSERT INTO jobs (id, task, queue, args, attempts, status, seq, created_at, finished_at)
SELECT seq, 'ostler:newest', 'default', '{}', 1, 'done', 2, 0, 0 FROM sqlite_sequence
 WHERE name = 'jobs' AND seq > (SELECT coalesce(max(id), 0) FROM jobs);
CREATE TRIGGER jobs_keep_newest BEFORE DELETE ON jobs WHEN old.id = (SELECT max(id) FROM jobs)
BEGIN SELECT RAISE(IGNORE); END;

-- A row for each start of a node, with the beat that says whether it lives. Its own row in `health` is no more.
CREATE TABLE nodes (
  id         TEXT PRIMARY KEY,                             -- made anew at each start: name@random
  name       TEXT NOT NULL,                                -- for people; may be given twice
  host       TEXT,
  home       TEXT,                                         -- which data directory: whoever holds its lock knows the others dead
  boot_id    TEXT,
  pid        INTEGER,
  pid_start  INTEGER,
  token      TEXT,                                         -- what its processes carry, so that a successor finds them
  url        TEXT,                                         -- where other nodes reach it; NULL: nowhere
  version    TEXT,
  status     TEXT NOT NULL CHECK (status IN ('starting', 'healthy', 'stopping', 'stopped', 'dead')),
  lease_ms   INTEGER NOT NULL,                             -- it is dead when its beat is older
  beat_at    INTEGER NOT NULL,
  skew_ms    INTEGER NOT NULL DEFAULT 0,                   -- how far its clock is ahead of the store's
  started_at INTEGER NOT NULL,
  ended_at   INTEGER,
  released   INTEGER NOT NULL DEFAULT 0,                   -- 1: it has ended, and what it held is given back
  heir       TEXT,                                         -- the node that took over the history of its workers
  turn       INTEGER NOT NULL DEFAULT 0,                   -- the last transaction of its dispatcher
  waits      TEXT NOT NULL DEFAULT '[]'                    -- queues for which it has idle workers (JSON)
) STRICT, WITHOUT ROWID;

INSERT INTO nodes (id, name, boot_id, pid, pid_start, token, status, lease_ms, beat_at, started_at, ended_at)
SELECT node, node, json_extract(metadata, '$.boot_id'), pid, pid_start, json_extract(metadata, '$.token'),
       CASE WHEN status IN ('stopped', 'failed', 'crashed') THEN 'stopped' ELSE 'dead' END, 30000, last_heartbeat,
       coalesce(started_at, created_at), last_heartbeat
  FROM health WHERE component = 'node';
DELETE FROM health WHERE component = 'node';

-- Which node's app declares what. A task or schedule that no living node declares is gone.
CREATE TABLE declared (
  node TEXT NOT NULL,
  kind TEXT NOT NULL CHECK (kind IN ('task', 'schedule')),
  name TEXT NOT NULL,
  PRIMARY KEY (node, kind, name)
) STRICT, WITHOUT ROWID;
ALTER TABLE tasks ADD COLUMN gone INTEGER NOT NULL DEFAULT 0;

-- Queued jobs of tasks that are gone have later = 2: they are out of the ready index until a node declares the task again.
CREATE INDEX jobs_unserved ON jobs (task) WHERE status = 'queued' AND later = 2;

-- What an operator wants of a worker or pool of some node. The node answers in the row.
CREATE TABLE wishes (
  id       INTEGER PRIMARY KEY AUTOINCREMENT,
  node     TEXT NOT NULL,
  verb     TEXT NOT NULL,
  target   TEXT NOT NULL,
  asked_at INTEGER NOT NULL,
  done_at  INTEGER,
  answer   TEXT                                            -- JSON
) STRICT;
CREATE INDEX wishes_open ON wishes (node) WHERE done_at IS NULL;

PRAGMA writable_schema = 1;
UPDATE sqlite_master SET sql = replace(sql, 'INTEGER PRIMARY KEY AUTOINCREMENT', 'INTEGER PRIMARY KEY')
 WHERE type = 'table' AND name = 'jobs';
PRAGMA writable_schema = RESET;
