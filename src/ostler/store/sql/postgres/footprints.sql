-- Peaks of memory by task, model, environment and kind of device.

-- name: footprints
SELECT task, model, env, device, host_mb, gpu_mb, load_ms, runs, at FROM ostler.footprints ORDER BY task, model, env, device;

-- name: put_footprint
-- A run that needed more counts in full, one that needed less only by a quarter: one small run says little.
INSERT INTO ostler.footprints AS f (task, model, env, device, host_mb, gpu_mb, load_ms, runs, at)
VALUES (:task, :model, :env, :device, :host_mb, :gpu_mb, :load_ms, 1, :now)
ON CONFLICT (task, model, env, device) DO UPDATE
   SET host_mb = greatest(excluded.host_mb, 0.75 * f.host_mb + 0.25 * excluded.host_mb),
       gpu_mb = greatest(excluded.gpu_mb, 0.75 * f.gpu_mb + 0.25 * excluded.gpu_mb),
       load_ms = coalesce(excluded.load_ms, f.load_ms), runs = f.runs + 1, at = excluded.at;

-- name: prune_footprints
DELETE FROM ostler.footprints WHERE at < :before;
