-- What jobs have published.

-- name: artifact_begin
INSERT INTO artifacts (job, key, home) VALUES (:job, :key, :home) ON CONFLICT DO NOTHING;

-- name: artifact_done
INSERT INTO artifacts (job, key, home, at, size, sha256) VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (job, key, home) DO UPDATE SET at = excluded.at, size = excluded.size, sha256 = excluded.sha256;

-- name: artifacts_of
-- The last publish of the job under each key. `replaced_by`: another job has published there since.
SELECT a.job, a.key, a.home, a.at, a.size, a.sha256,
       (SELECT b.job FROM artifacts AS b WHERE b.key = a.key AND (b.at, b.job) > (a.at, a.job) AND b.job <> a.job
         ORDER BY b.at DESC, b.job DESC LIMIT 1) AS replaced_by
  FROM artifacts AS a WHERE a.job = :job AND a.key > :after
   AND NOT EXISTS (SELECT 1 FROM artifacts AS b WHERE b.job = a.job AND b.key = a.key
                      AND (coalesce(b.at, 0), b.home) > (coalesce(a.at, 0), a.home))
 ORDER BY a.key LIMIT :limit;

-- name: artifact_newest
SELECT job, key, home, at, size, sha256, NULL AS replaced_by FROM artifacts WHERE key = :key AND at IS NOT NULL AND gone_at IS NULL
 ORDER BY at DESC, job DESC LIMIT 1;

-- name: artifacts_mark_gone
UPDATE artifacts SET gone_at = :now WHERE job IN (SELECT value FROM json_each(:ids));

-- name: artifacts_gone
SELECT job, key, home, gone_at FROM artifacts WHERE gone_at IS NOT NULL AND (job, key, home) > (:job, :key, :home)
 ORDER BY job, key, home LIMIT :limit;

-- name: artifact_forget
DELETE FROM artifacts WHERE job = ? AND key = ? AND home = ? AND gone_at IS NOT NULL;
