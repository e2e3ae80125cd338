-- Jobs whose end somebody waits for in a process without a node, until when. There is nobody to tell here: PostgreSQL has NOTIFY.
CREATE TABLE waiters (
  job   INTEGER NOT NULL PRIMARY KEY,
  until INTEGER NOT NULL
) STRICT;
