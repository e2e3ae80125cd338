-- The row tells when its latest run was claimed. claim_seq is the number of that event in the timeline; NULL: the event is stored,
-- or the job was not claimed since it was last queued.
ALTER TABLE jobs ADD COLUMN claimed_at INTEGER;
ALTER TABLE jobs ADD COLUMN claim_seq INTEGER;

-- A job's row tells three of its events: `created`, `processing` of its latest run, and `done`. So a plain job has no row in
-- job_events. Where one is stored all the same, as older schemas did, that one counts. All parts have the same types, so that SQLite
-- reads a page of the view in order and stops at its end.
CREATE VIEW timeline (job, seq, at, name, data) AS
SELECT job, seq, at, name, data FROM job_events
 UNION ALL
SELECT id, CAST(1 AS INTEGER), created_at, CAST('created' AS TEXT), CAST(NULL AS TEXT) FROM jobs
 WHERE NOT EXISTS (SELECT 1 FROM job_events WHERE job = jobs.id AND seq = 1)
 UNION ALL
SELECT id, claim_seq, claimed_at, CAST('processing' AS TEXT), CAST(json_object('attempt', attempt, 'worker', worker, 'node', node) AS TEXT) FROM jobs
 WHERE claim_seq IS NOT NULL AND NOT EXISTS (SELECT 1 FROM job_events WHERE job = jobs.id AND seq = claim_seq)
 UNION ALL
SELECT id, seq, finished_at, CAST('done' AS TEXT), CAST(NULL AS TEXT) FROM jobs
 WHERE status = 'done' AND NOT EXISTS (SELECT 1 FROM job_events WHERE job = jobs.id AND seq = jobs.seq);

-- AUTOINCREMENT writes another page with each enqueue. Ids are never used twice all the same: the newest job stays when old ones are
-- deleted, so that the next id is always above all that were ever given. Here that may need a stand-in, which goes like any old job.
INSERT INTO jobs (id, task, queue, args, attempts, status, seq, created_at, finished_at)
SELECT seq, 'ostler:newest', 'default', '{}', 1, 'done', 2, 0, 0 FROM sqlite_sequence
 WHERE name = 'jobs' AND seq > (SELECT coalesce(max(id), 0) FROM jobs);
CREATE TRIGGER jobs_keep_newest BEFORE DELETE ON jobs WHEN old.id = (SELECT max(id) FROM jobs)
BEGIN SELECT RAISE(IGNORE); END;
PRAGMA writable_schema = 1;
UPDATE sqlite_master SET sql = replace(sql, 'INTEGER PRIMARY KEY AUTOINCREMENT', 'INTEGER PRIMARY KEY')
 WHERE type = 'table' AND name = 'jobs';
PRAGMA writable_schema = RESET;
