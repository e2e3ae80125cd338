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
