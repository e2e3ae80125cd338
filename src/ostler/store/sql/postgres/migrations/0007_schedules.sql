-- A schedule can be paused.

ALTER TABLE ostler.schedules ADD COLUMN paused integer NOT NULL DEFAULT 0;
