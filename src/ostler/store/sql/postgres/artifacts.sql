-- What jobs have published.

-- name: artifact_begin
INSERT INTO ostler.artifacts (job, key, home) VALUES (:job, :key, :home) ON CONFLICT DO NOTHING;

-- name: artifact_done
INSERT INTO ostler.artifacts (job, key, home, at, size, sha256)
SELECT (row ->> 0)::bigint, row ->> 1, row ->> 2, (row ->> 3)::bigint, (row ->> 4)::bigint, row ->> 5
  FROM jsonb_array_elements(:rows::jsonb) AS row
ON CONFLICT (job, key, home) DO UPDATE SET at = excluded.at, size = excluded.size, sha256 = excluded.sha256;

-- name: artifacts_of
-- The last publish of the job under each key. `replaced_by`: another job has published there since.
SELECT a.job, a.key, a.home, a.at, a.size, a.sha256,
       (SELECT b.job FROM ostler.artifacts AS b WHERE b.key = a.key AND (b.at, b.job) > (a.at, a.job) AND b.job <> a.job
         ORDER BY b.at DESC, b.job DESC LIMIT 1) AS replaced_by
  FROM ostler.artifacts AS a WHERE a.job = :job AND a.key > :after
   AND NOT EXISTS (SELECT 1 FROM ostler.artifacts AS b WHERE b.job = a.job AND b.key = a.key
                      AND (coalesce(b.at, 0), b.home) > (coalesce(a.at, 0), a.home))
 ORDER BY a.key LIMIT :limit;

-- name: artifact_newest
SELECT job, key, home, at, size, sha256, NULL::bigint AS replaced_by FROM ostler.artifacts
 WHERE key = :key AND at IS NOT NULL AND gone_at IS NULL ORDER BY at DESC, job DESC LIMIT 1;

-- name: artifacts_mark_gone
UPDATE ostler.artifacts SET gone_at = :now WHERE job = ANY (ARRAY(SELECT v::bigint FROM jsonb_array_elements_text(:ids::jsonb) AS v));

-- name: artifacts_gone
SELECT job, key, home, gone_at FROM ostler.artifacts WHERE gone_at IS NOT NULL AND (job, key, home) > (:job, :key, :home)
 ORDER BY job, key, home LIMIT :limit;

-- name: artifact_forget
DELETE FROM ostler.artifacts USING jsonb_array_elements(:rows::jsonb) AS row
 WHERE job = (row ->> 0)::bigint AND key = row ->> 1 AND home = row ->> 2 AND gone_at IS NOT NULL;
