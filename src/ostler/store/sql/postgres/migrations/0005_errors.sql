-- How each run of a job failed, with its traceback. Runs that are done write nothing here. `seq` is the number of the run's last event.
CREATE TABLE ostler.job_errors (
  job  bigint NOT NULL,
  seq  int NOT NULL,
  at   bigint NOT NULL,
  node text,
  data text NOT NULL,                                      -- JSON: attempt, worker, kind, code, message, traceback, duration_ms
  PRIMARY KEY (job, seq)
);

-- As before, except that `attempt` has the number that everybody else shows: runs that count against `attempts`.
CREATE OR REPLACE VIEW ostler.timeline (job, seq, at, name, data) AS
SELECT job, seq, at, name, data FROM ostler.job_events
 UNION ALL
SELECT id, 1, created_at, 'created', NULL FROM ostler.jobs
 WHERE NOT EXISTS (SELECT 1 FROM ostler.job_events WHERE job = jobs.id AND seq = 1)
 UNION ALL
SELECT id, claim_seq, claimed_at, 'processing',
       json_build_object('attempt', attempt - excused, 'worker', worker, 'node', node)::text FROM ostler.jobs
 WHERE claim_seq IS NOT NULL AND NOT EXISTS (SELECT 1 FROM ostler.job_events WHERE job = jobs.id AND seq = claim_seq)
 UNION ALL
SELECT id, seq, finished_at, 'done', NULL FROM ostler.jobs
 WHERE status = 'done' AND NOT EXISTS (SELECT 1 FROM ostler.job_events e WHERE e.job = jobs.id AND e.seq = jobs.seq);
