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
