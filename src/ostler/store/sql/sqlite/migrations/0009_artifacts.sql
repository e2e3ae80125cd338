-- What jobs have published, under any key. A row is written before the file is (so that whatever a killed run leaves can be deleted
-- with its job), and completed when the run says that the file is there. `home` is the data directory whose node published it: one that
-- publishes the same again, after another run did so elsewhere, does not know of that file.
CREATE TABLE artifacts (
  job     INTEGER NOT NULL,
  key     TEXT NOT NULL,
  home    TEXT NOT NULL,
  at      INTEGER,
  size    INTEGER,
  sha256  TEXT,
  gone_at INTEGER,                -- its job was deleted then, and the file goes next
  PRIMARY KEY (job, key, home)
) STRICT, WITHOUT ROWID;

CREATE INDEX artifacts_key  ON artifacts (key);
CREATE INDEX artifacts_gone ON artifacts (job, key, home) WHERE gone_at IS NOT NULL;
