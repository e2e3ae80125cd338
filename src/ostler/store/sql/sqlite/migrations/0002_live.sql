-- Counters over time, written in the transaction that they count. `step` is the width of a bucket in seconds, 0 for ever;
-- `at` its beginning in seconds UTC. Names: done, failed, cancelled, retried, crashed, run_ms; `run:N` and `wait:N` are bins.
CREATE TABLE tallies (
  step  INTEGER NOT NULL,
  at    INTEGER NOT NULL,
  queue TEXT NOT NULL,
  name  TEXT NOT NULL,
  n     INTEGER NOT NULL,
  PRIMARY KEY (step, at, queue, name)
) STRICT, WITHOUT ROWID;

INSERT INTO tallies (step, at, queue, name, n)
SELECT 0, 0, queue, status, count(*) FROM jobs WHERE status IN ('done', 'failed', 'cancelled') GROUP BY queue, status;
INSERT INTO tallies (step, at, queue, name, n)
SELECT 0, 0, queue, 'run_ms', sum(finished_at - started_at) FROM jobs
 WHERE status = 'done' AND started_at IS NOT NULL GROUP BY queue;

-- What an operator wants to have been told, in words. An incident may be rewritten as it goes on: (node, id) stays.
CREATE TABLE incidents (
  node    TEXT NOT NULL,
  id      INTEGER NOT NULL,                                -- milliseconds UTC of its beginning, made unique per node
  level   TEXT NOT NULL CHECK (level IN ('info', 'warning', 'error')),
  subject TEXT NOT NULL,
  text    TEXT NOT NULL,
  count   INTEGER NOT NULL DEFAULT 1,
  at      INTEGER NOT NULL,                                -- the last time that it changed
  job     INTEGER,
  detail  TEXT,
  PRIMARY KEY (node, id)
) STRICT, WITHOUT ROWID;
CREATE INDEX incidents_by_time ON incidents (at);
