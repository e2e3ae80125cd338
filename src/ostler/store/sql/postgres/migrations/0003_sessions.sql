-- Workers that take sessions, as living nodes have announced them.
CREATE TABLE ostler.session_workers (
  node       text NOT NULL,
  component  text NOT NULL,
  generation bigint NOT NULL,
  pool       text NOT NULL,
  serves     text NOT NULL,                                -- the name that clients ask for
  address    text NOT NULL,
  slots      bigint NOT NULL,
  lifetime   bigint NOT NULL,                             -- sessions in all; 0: no limit
  served     bigint NOT NULL,
  status     text NOT NULL CHECK (status IN ('available', 'draining')),
  wanted     text NOT NULL CHECK (wanted IN ('serve', 'drain')),
  versions   text NOT NULL,                                -- JSON
  started_at bigint NOT NULL,
  beat_at    bigint NOT NULL,
  PRIMARY KEY (node, component, generation)
);

-- Sessions, live and ended. What a worker has in use is counted from the live ones.
CREATE TABLE ostler.sessions (
  id         text NOT NULL PRIMARY KEY,
  pool       text NOT NULL,
  serves     text NOT NULL,
  node       text NOT NULL,
  component  text NOT NULL,
  generation bigint NOT NULL,
  owner      text NOT NULL,
  priority   bigint NOT NULL,
  client     text,
  agent      text,
  key        text,                                         -- by which a client finds its session again
  via        text,                                         -- the node that passed it on
  waited_ms  float8 NOT NULL,
  started_at bigint NOT NULL,
  ended_at   bigint,
  reason     text,
  text       text,
  code       bigint,                                      -- of the WebSocket's close
  bytes_in   bigint NOT NULL,
  bytes_out  bigint NOT NULL,
  seen_at    bigint NOT NULL,
  wanted     text CHECK (wanted = 'end')                   -- somebody asked to end it
) WITH (fillfactor = 80);                                  -- each heartbeat writes to the live ones

CREATE INDEX sessions_live ON ostler.sessions (node, component, generation) WHERE ended_at IS NULL;
CREATE INDEX sessions_newest ON ostler.sessions (started_at, id);
CREATE INDEX sessions_ended ON ostler.sessions (ended_at, id) WHERE ended_at IS NOT NULL;
