-- Times are milliseconds UTC. JSON is text. One writer at a time (BEGIN IMMEDIATE), many readers (WAL).

CREATE TABLE meta (
  key   TEXT PRIMARY KEY,
  value TEXT NOT NULL
) STRICT, WITHOUT ROWID;

-- What the newest node declared, so that any process can check a job before it is stored.
CREATE TABLE tasks (
  name        TEXT PRIMARY KEY,
  queue       TEXT NOT NULL,
  attempts    INTEGER NOT NULL,
  timeout     REAL,
  priority    INTEGER NOT NULL DEFAULT 0,
  policy      TEXT NOT NULL DEFAULT '{}',                  -- backoff, uniqueness and limits, as declared
  parameters  TEXT NOT NULL,
  declared_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE TABLE jobs (
  id          INTEGER PRIMARY KEY AUTOINCREMENT,          -- never used twice, also not after a purge
  task        TEXT NOT NULL,
  queue       TEXT NOT NULL,
  args        TEXT NOT NULL,
  priority    INTEGER NOT NULL DEFAULT 0,
  attempts    INTEGER NOT NULL,                            -- runs in all that transient failures may use
  timeout     REAL,                                        -- seconds
  status      TEXT NOT NULL DEFAULT 'queued' CHECK (status IN ('queued', 'processing', 'done', 'failed', 'cancelled')),
  later       INTEGER NOT NULL DEFAULT 0,                  -- queued, but not before run_at
  run_at      INTEGER,
  attempt     INTEGER NOT NULL DEFAULT 0,                  -- runs begun, counted at the claim
  crashes     INTEGER NOT NULL DEFAULT 0,                  -- runs that took their worker down
  excused     INTEGER NOT NULL DEFAULT 0,                  -- runs that ended through no fault of the job
  fence       INTEGER NOT NULL DEFAULT 0,                  -- claims ever made; a write must name the current one
  seq         INTEGER NOT NULL DEFAULT 0,                  -- last number of its timeline
  node        TEXT,
  worker      TEXT,
  backoff     TEXT,                                        -- {"base", "max"} where the task has its own
  limit_key   TEXT,                                        -- at most limit_max of these run at once
  limit_max   INTEGER,
  unique_key  TEXT,
  batch       INTEGER,
  next        TEXT,                                        -- what follows when it is done: a list of steps
  cancel      INTEGER NOT NULL DEFAULT 0,
  progress    REAL,
  stage       TEXT,
  result      TEXT,
  error       TEXT,
  created_at  INTEGER NOT NULL,
  started_at  INTEGER,
  finished_at INTEGER
) STRICT;

-- Each index is partial and covers only live or rare rows: millions of finished jobs cost the claim nothing.
CREATE INDEX jobs_ready   ON jobs (queue, priority DESC, id) WHERE status = 'queued' AND later = 0;
CREATE INDEX jobs_later   ON jobs (run_at)                   WHERE status = 'queued' AND later = 1;
CREATE INDEX jobs_claimed ON jobs (worker, id)               WHERE status = 'processing';
CREATE INDEX jobs_limited ON jobs (limit_key)                WHERE status = 'processing' AND limit_key IS NOT NULL;
CREATE INDEX jobs_ended   ON jobs (status, id)               WHERE status IN ('failed', 'cancelled');

CREATE TABLE job_events (
  job  INTEGER NOT NULL,
  seq  INTEGER NOT NULL,
  at   INTEGER NOT NULL,
  name TEXT NOT NULL,
  data TEXT,
  PRIMARY KEY (job, seq)
) STRICT, WITHOUT ROWID;

-- One live job per key, or one per period: `until` NULL means while the job is live.
CREATE TABLE uniques (
  key   TEXT PRIMARY KEY,
  job   INTEGER NOT NULL,
  until INTEGER
) STRICT, WITHOUT ROWID;

-- A token bucket per queue with a rate.
CREATE TABLE rates (
  queue  TEXT PRIMARY KEY,
  tokens REAL NOT NULL,
  at     INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Jobs that belong together; the callback is stored when the last of them has ended.
CREATE TABLE batches (
  id         INTEGER PRIMARY KEY AUTOINCREMENT,
  total      INTEGER NOT NULL,
  pending    INTEGER NOT NULL,
  failed     INTEGER NOT NULL DEFAULT 0,
  callback   TEXT,
  callback_job INTEGER,
  created_at INTEGER NOT NULL,
  finished_at INTEGER
) STRICT;
CREATE INDEX jobs_batch ON jobs (batch) WHERE batch IS NOT NULL;

-- Cron. Whoever moves next_at forward stores the job, in the same transaction: no schedule fires twice.
CREATE TABLE schedules (
  name     TEXT PRIMARY KEY,
  spec     TEXT NOT NULL,
  zone     TEXT NOT NULL,
  step     TEXT NOT NULL,
  next_at  INTEGER NOT NULL,
  last_at  INTEGER,
  last_job INTEGER
) STRICT, WITHOUT ROWID;

-- One row per component: the node itself ('node') and each worker slot ('worker:{pool}:{n}').
CREATE TABLE health (
  node           TEXT NOT NULL,
  component      TEXT NOT NULL,
  pool           TEXT,
  generation     INTEGER NOT NULL DEFAULT 0,
  status         TEXT NOT NULL CHECK (status IN ('stopped', 'starting', 'healthy', 'draining', 'stopping', 'crashed', 'failed')),
  pid            INTEGER,
  pid_start      INTEGER,                                  -- a pid alone is no identity: pids are reused
  last_heartbeat INTEGER NOT NULL,
  restart_count  INTEGER NOT NULL DEFAULT 0,               -- crashes in its lifetime, until reset
  streak         INTEGER NOT NULL DEFAULT 0,               -- crashes in a row, until healthy for a while
  last_restart   INTEGER,
  exit_code      INTEGER,
  exit_reason    TEXT,
  rss_mb         REAL,
  started_at     INTEGER,
  created_at     INTEGER NOT NULL,
  metadata       TEXT,
  PRIMARY KEY (node, component)
) STRICT, WITHOUT ROWID;

-- Every end of a worker process. `crash` rows within the window decide about the next restart.
CREATE TABLE exits (
  id         INTEGER PRIMARY KEY AUTOINCREMENT,
  node       TEXT NOT NULL,
  component  TEXT NOT NULL,
  generation INTEGER NOT NULL,
  at         INTEGER NOT NULL,
  reason     TEXT NOT NULL,
  code       INTEGER,
  signal     TEXT,
  kind       TEXT NOT NULL CHECK (kind IN ('asked', 'clean', 'crash')),
  counted    INTEGER NOT NULL DEFAULT 1,                   -- 0 after a reset
  peak_rss_mb REAL,
  job        INTEGER,
  log        TEXT
) STRICT;
CREATE INDEX exits_component ON exits (node, component, at);
