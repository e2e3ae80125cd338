-- A schedule can be paused.

ALTER TABLE schedules ADD COLUMN paused INTEGER NOT NULL DEFAULT 0;
