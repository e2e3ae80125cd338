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

-- Calls that have ended. The id is the microsecond in which the node noted it: nodes share the table and ask nobody for ids.
CREATE TABLE ostler.calls (
  id        bigint NOT NULL,
  node      text NOT NULL,
  request   text NOT NULL,                                 -- the id that the caller knows it by
  task      text NOT NULL,
  model     text NOT NULL,
  worker    text,                                          -- NULL: it never reached one
  asked_at  bigint NOT NULL,
  waited_ms float8 NOT NULL,                               -- in line, for a worker or a place in one
  took_ms   float8,                                        -- in the worker
  bytes_in  bigint NOT NULL,
  bytes_out bigint NOT NULL,
  status    int NOT NULL,                                  -- of HTTP
  outcome   text NOT NULL CHECK (outcome IN ('done', 'error', 'refused', 'cancelled', 'died', 'deadline')),
  code      text,                                          -- of an error that is not the model's own
  streamed  int NOT NULL,
  host_mb   float8,                                        -- the worker's peaks up to then
  gpu_mb    float8,
  PRIMARY KEY (id, node)
);
