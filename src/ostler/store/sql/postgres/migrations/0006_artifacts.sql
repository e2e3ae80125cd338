-- What jobs have published, under any key. A row is written before the file is (so that whatever a killed run leaves can be deleted
-- with its job), and completed when the run says that the file is there. `home` is the data directory whose node published it: one that
-- publishes the same again, after another run did so elsewhere, does not know of that file.
CREATE TABLE ostler.artifacts (
  job     bigint NOT NULL,
  key     text COLLATE "C" NOT NULL,
  home    text NOT NULL,
  at      bigint,
  size    bigint,
  sha256  text,
  gone_at bigint,                 -- its job was deleted then, and the file goes next
  PRIMARY KEY (job, key, home)
);

CREATE INDEX artifacts_key  ON ostler.artifacts (key);
CREATE INDEX artifacts_gone ON ostler.artifacts (job, key, home) WHERE gone_at IS NOT NULL;
