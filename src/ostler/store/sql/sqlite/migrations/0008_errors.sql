-- How each run of a job failed, with its traceback. Runs that are done write nothing here. `seq` is the number of the run's last event.
CREATE TABLE job_errors (
  job  INTEGER NOT NULL,
  seq  INTEGER NOT NULL,
  at   INTEGER NOT NULL,
  node TEXT,
  data TEXT NOT NULL,                                      -- JSON: attempt, worker, kind, code, message, traceback, duration_ms
  PRIMARY KEY (job, seq)
) STRICT, WITHOUT ROWID;

-- As before, except that `attempt` has the number that everybody else shows: runs that count against `attempts`.
DROP VIEW timeline;
CREATE VIEW timeline (job, seq, at, name, data) AS
SELECT job, seq, at, name, data FROM job_events
 UNION ALL
SELECT id, CAST(1 AS INTEGER), created_at, CAST('created' AS TEXT), CAST(NULL AS TEXT) FROM jobs
 WHERE NOT EXISTS (SELECT 1 FROM job_events WHERE job = jobs.id AND seq = 1)
 UNION ALL
SELECT id, claim_seq, claimed_at, CAST('processing' AS TEXT),
       CAST(json_object('attempt', attempt - excused, 'worker', worker, 'node', node) AS TEXT) FROM jobs
 WHERE claim_seq IS NOT NULL AND NOT EXISTS (SELECT 1 FROM job_events WHERE job = jobs.id AND seq = claim_seq)
 UNION ALL
SELECT id, seq, finished_at, CAST('done' AS TEXT), CAST(NULL AS TEXT) FROM jobs
 WHERE status = 'done' AND NOT EXISTS (SELECT 1 FROM job_events WHERE job = jobs.id AND seq = jobs.seq);
