-- What workers needed in earlier runs: the next one of the same task, model and environment on the same kind of device reserves that.
CREATE TABLE ostler.footprints (
  task    text NOT NULL,
  model   text NOT NULL,                                   -- '': the task's workers have no model
  env     text NOT NULL,                                   -- '': the node's own environment
  device  text NOT NULL,                                   -- the GPU by name, or cpu
  host_mb float8 NOT NULL,                                 -- peaks
  gpu_mb  float8 NOT NULL,
  load_ms bigint,                                          -- from spawn to ready, in the latest run
  runs    int NOT NULL,
  at      bigint NOT NULL,                                 -- when it was last measured
  PRIMARY KEY (task, model, env, device)
);
