-- The health table of seed 001. Every write names the generation that makes it: a ghost cannot overwrite its successor.

-- name: register
INSERT INTO health (node, component, pool, key, generation, status, last_heartbeat, created_at)
VALUES (:node, :component, :pool, :key, 0, 'stopped', :now, :now)
ON CONFLICT (node, component) DO UPDATE SET pool = excluded.pool;

-- name: mark_starting
UPDATE health SET status = 'starting', generation = :generation, pid = :pid, pid_start = :pid_start, last_heartbeat = :now,
       started_at = :now, rss_mb = NULL, exit_code = NULL, exit_reason = NULL, metadata = :metadata
 WHERE node = :node AND component = :component AND generation < :generation RETURNING component;

-- name: mark
UPDATE health SET status = :status, last_heartbeat = CASE WHEN :status = 'healthy' THEN :now ELSE last_heartbeat END
 WHERE node = :node AND component = :component AND generation = :generation RETURNING component;

-- name: mark_waiting
UPDATE health SET metadata = json_set(coalesce(metadata, '{}'), '$.waiting_for', :why)
 WHERE node = :node AND component = :component AND generation = :generation RETURNING component;

-- name: mark_ended
-- A crash or a stop does not refresh the heartbeat: it is the last time that the worker was heard.
UPDATE health SET status = :status, pid = NULL, pid_start = NULL, exit_code = :exit_code, exit_reason = :exit_reason, rss_mb = NULL,
       metadata = :metadata
 WHERE node = :node AND component = :component AND generation = :generation RETURNING component;

-- name: workers_released
-- Their node has ended, and they with it. The heartbeat stays the last one that was heard.
UPDATE health SET status = 'stopped', pid = NULL, pid_start = NULL, rss_mb = NULL, exit_reason = 'node-died'
 WHERE node = :node AND status IN ('starting', 'healthy', 'draining', 'stopping');

-- name: heartbeats
UPDATE health SET last_heartbeat = b.at, rss_mb = coalesce(b.rss, rss_mb)
  FROM (SELECT json_extract(value, '$[0]') AS component, json_extract(value, '$[1]') AS generation,
               json_extract(value, '$[2]') AS at, json_extract(value, '$[3]') AS rss FROM json_each(:batch)) AS b
 WHERE health.node = :node AND health.component = b.component AND health.generation = b.generation
RETURNING health.component;

-- name: add_exit
-- Once: the write may come a second time, when the answer to the first was lost.
INSERT INTO exits (node, component, generation, at, reason, code, signal, kind, counted, peak_rss_mb, item, log)
SELECT :node, :component, :generation, :at, :reason, :code, :signal, :kind, :counted, :peak_rss_mb, :item, :log
 WHERE NOT EXISTS (SELECT 1 FROM exits WHERE node = :node AND component = :component AND generation = :generation AND at = :at)
RETURNING generation;

-- name: increment_restart_count
UPDATE health SET restart_count = restart_count + 1, streak = streak + 1, last_restart = :now
 WHERE node = :node AND component = :component AND generation = :generation RETURNING restart_count, streak, last_restart;

-- name: end_streak
UPDATE health SET streak = 0 WHERE node = :node AND component = :component AND generation = :generation RETURNING component;

-- name: reset_restart_count
UPDATE health SET restart_count = 0, streak = 0, last_restart = NULL, exit_code = NULL, exit_reason = NULL, metadata = NULL,
       status = CASE WHEN status IN ('failed', 'crashed') THEN 'stopped' ELSE status END
 WHERE node = :node AND component = :component RETURNING component;

-- name: forget_exits
UPDATE exits SET counted = 0 WHERE node = :node AND component = :component AND counted = 1;

-- name: forgive_crashes
UPDATE exits SET counted = 0 WHERE node = :node AND component = :component AND counted = 1 AND kind = 'crash';

-- name: counted_exits
SELECT at, kind FROM exits WHERE node = :node AND component = :component AND counted = 1 AND at > :since ORDER BY at;

-- name: exits
SELECT generation, at, reason, code, signal, kind, counted, peak_rss_mb, item, log FROM exits
 WHERE node = :node AND component = :component ORDER BY id DESC LIMIT :limit;

-- name: prune_exits
DELETE FROM exits WHERE at < :before;

-- name: component
-- The running job is the first of those that the worker has in hand: claims are handed over in this order.
SELECT h.*, (SELECT id FROM jobs j WHERE j.status = 'processing' AND j.worker = h.component AND j.node = h.node
                ORDER BY j.started_at, j.priority DESC, j.id LIMIT 1) AS current_job
  FROM health h WHERE h.node = :node AND h.component = :component;

-- name: workers
SELECT h.*, t.id AS current_job, t.task AS current_task
  FROM health h LEFT JOIN jobs t
       ON t.id = (SELECT id FROM jobs j WHERE j.status = 'processing' AND j.worker = h.component AND j.node = h.node
                   ORDER BY j.started_at, j.priority DESC, j.id LIMIT 1)
 WHERE (:node IS NULL OR h.node = :node) ORDER BY h.node, h.pool, h.component;

-- name: served_pools
SELECT DISTINCT w.pool FROM health w JOIN nodes n ON n.id = w.node
 WHERE n.status IN ('starting', 'healthy') AND n.beat_at > :since;

-- name: remove_component
DELETE FROM health WHERE node = :node AND component = :component;

-- name: meta_get
SELECT value FROM meta WHERE key = :key;

-- name: meta_set
INSERT INTO meta (key, value) VALUES (:key, :value) ON CONFLICT (key) DO UPDATE SET value = excluded.value;

-- name: meta_delete
DELETE FROM meta WHERE key = :key;

-- name: meta_like
SELECT key, value FROM meta WHERE key = 'worker_enabled' OR key LIKE 'pool_paused:%';
