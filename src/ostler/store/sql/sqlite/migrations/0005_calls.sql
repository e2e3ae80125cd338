-- What workers needed in earlier runs: the next one of the same task, model and environment on the same kind of device reserves that.
CREATE TABLE footprints (
  task    TEXT NOT NULL,
  model   TEXT NOT NULL,                                   -- '': the task's workers have no model
  env     TEXT NOT NULL,                                   -- '': the node's own environment
  device  TEXT NOT NULL,                                   -- the GPU by name, or cpu
  host_mb REAL NOT NULL,                                   -- peaks
  gpu_mb  REAL NOT NULL,
  load_ms INTEGER,                                         -- from spawn to ready, in the latest run
  runs    INTEGER NOT NULL,
  at      INTEGER NOT NULL,                                -- when it was last measured
  PRIMARY KEY (task, model, env, device)
) STRICT, WITHOUT ROWID;

-- Calls that have ended. The id is the microsecond in which the node noted it: nodes share the table and ask nobody for ids.
CREATE TABLE calls (
  id        INTEGER NOT NULL,
  node      TEXT NOT NULL,
  request   TEXT NOT NULL,                                 -- the id that the caller knows it by
  task      TEXT NOT NULL,
  model     TEXT NOT NULL,
  worker    TEXT,                                          -- NULL: it never reached one
  asked_at  INTEGER NOT NULL,
  waited_ms REAL NOT NULL,                                 -- in line, for a worker or a place in one
  took_ms   REAL,                                          -- in the worker
  bytes_in  INTEGER NOT NULL,
  bytes_out INTEGER NOT NULL,
  status    INTEGER NOT NULL,                              -- of HTTP
  outcome   TEXT NOT NULL CHECK (outcome IN ('done', 'error', 'refused', 'cancelled', 'died', 'deadline')),
  code      TEXT,                                          -- of an error that is not the model's own
  streamed  INTEGER NOT NULL,
  host_mb   REAL,                                          -- the worker's peaks up to then
  gpu_mb    REAL,
  PRIMARY KEY (id, node)
) STRICT, WITHOUT ROWID;
