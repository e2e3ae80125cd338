-- Schedules.

-- name: schedule_put
INSERT INTO ostler.schedules (name, spec, zone, step, next_at) VALUES (:name, :spec, :zone, :step, :next_at)
ON CONFLICT (name) DO UPDATE SET step = excluded.step,
       next_at = CASE WHEN schedules.spec = excluded.spec AND schedules.zone = excluded.zone THEN schedules.next_at ELSE excluded.next_at END,
       spec = excluded.spec, zone = excluded.zone;

-- name: schedules
-- Those that an app declares. The others are kept for a while, with their next time: their app may only be away.
SELECT name, spec, zone, step, next_at, last_at, last_job, paused FROM ostler.schedules
 WHERE name IN (SELECT name FROM ostler.declared WHERE kind = 'schedule') ORDER BY name;

-- name: schedules_of
SELECT name, spec, zone, next_at, paused FROM ostler.schedules
 WHERE name IN (SELECT name FROM ostler.declared WHERE node = :node AND kind = 'schedule') ORDER BY name;

-- name: schedule_due
SELECT name, spec, zone, step, next_at FROM ostler.schedules
 WHERE paused = 0 AND next_at <= :now AND name IN (SELECT name FROM ostler.declared WHERE node = :node AND kind = 'schedule') ORDER BY name;

-- name: schedule_move
UPDATE ostler.schedules SET next_at = :next_at WHERE name = :name AND next_at = :seen AND paused = 0 RETURNING name;

-- name: schedule_pull
-- A clock that had jumped ahead must not silence a schedule until the wrong time comes.
UPDATE ostler.schedules SET next_at = :next_at WHERE name = :name AND next_at > :next_at;

-- name: schedule_fired
UPDATE ostler.schedules SET last_job = :job, last_at = :now WHERE name = :name;

-- name: schedule
SELECT name, step FROM ostler.schedules WHERE name = :name;

-- name: schedule_pause
UPDATE ostler.schedules SET paused = :paused, next_at = :next_at WHERE name = :name;
