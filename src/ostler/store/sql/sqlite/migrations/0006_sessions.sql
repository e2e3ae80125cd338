-- Workers that take sessions, as living nodes have announced them.
CREATE TABLE session_workers (
  node       TEXT NOT NULL,
  component  TEXT NOT NULL,
  generation INTEGER NOT NULL,
  pool       TEXT NOT NULL,
  serves     TEXT NOT NULL,                                -- the name that clients ask for
  address    TEXT NOT NULL,
  slots      INTEGER NOT NULL,
  lifetime   INTEGER NOT NULL,                             -- sessions in all; 0: no limit
  served     INTEGER NOT NULL,
  status     TEXT NOT NULL CHECK (status IN ('available', 'draining')),
  wanted     TEXT NOT NULL CHECK (wanted IN ('serve', 'drain')),
  versions   TEXT NOT NULL,                                -- JSON
  started_at INTEGER NOT NULL,
  beat_at    INTEGER NOT NULL,
  PRIMARY KEY (node, component, generation)
) STRICT, WITHOUT ROWID;

-- Sessions, live and ended. What a worker has in use is counted from the live ones.
CREATE TABLE sessions (
  id         TEXT NOT NULL PRIMARY KEY,
  pool       TEXT NOT NULL,
  serves     TEXT NOT NULL,
  node       TEXT NOT NULL,
  component  TEXT NOT NULL,
  generation INTEGER NOT NULL,
  owner      TEXT NOT NULL,
  priority   INTEGER NOT NULL,
  client     TEXT,
  agent      TEXT,
  key        TEXT,                                         -- by which a client finds its session again
  via        TEXT,                                         -- the node that passed it on
  waited_ms  REAL NOT NULL,
  started_at INTEGER NOT NULL,
  ended_at   INTEGER,
  reason     TEXT,
  text       TEXT,
  code       INTEGER,                                      -- of the WebSocket's close
  bytes_in   INTEGER NOT NULL,
  bytes_out  INTEGER NOT NULL,
  seen_at    INTEGER NOT NULL,
  wanted     TEXT CHECK (wanted = 'end')                   -- somebody asked to end it
) STRICT, WITHOUT ROWID;

CREATE INDEX sessions_live ON sessions (node, component, generation) WHERE ended_at IS NULL;
CREATE INDEX sessions_newest ON sessions (started_at, id);
CREATE INDEX sessions_ended ON sessions (ended_at, id) WHERE ended_at IS NOT NULL;
