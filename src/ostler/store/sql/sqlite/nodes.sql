-- Nodes: who lives, what its app declares, what ended nodes leave behind.

-- name: node_register
INSERT INTO nodes (id, name, host, home, boot_id, pid, pid_start, token, url, version, status, lease_ms, beat_at, started_at)
VALUES (:id, :name, :host, :home, :boot_id, :pid, :pid_start, :token, :url, :version, 'starting', :lease_ms, :now, :now);

-- name: node_beat
UPDATE nodes SET beat_at = :now, skew_ms = :skew WHERE id = :id AND status IN ('starting', 'healthy', 'stopping') RETURNING id;

-- name: node_mark
UPDATE nodes SET status = :status, beat_at = :now WHERE id = :id AND status IN ('starting', 'healthy', 'stopping') RETURNING id;

-- name: node_end
UPDATE nodes SET status = 'stopped', ended_at = :now, waits = '[]' WHERE id = :id AND status <> 'dead' RETURNING id;

-- name: node_turn
-- The first statement of every turn: whoever was declared dead writes nothing, and a turn whose commit was in doubt is not written twice.
-- It also tells when the next scheduled job is due.
UPDATE nodes SET turn = :turn, beat_at = :now
 WHERE id = :id AND turn < :turn AND status IN ('starting', 'healthy', 'stopping')
RETURNING (SELECT min(run_at) FROM jobs WHERE status = 'queued' AND later = 1) AS due;

-- name: node
SELECT * FROM nodes WHERE id = :id;

-- name: nodes
SELECT * FROM nodes ORDER BY name, started_at;

-- name: declare_dead
-- The beat is too old, or it started before us in our data directory, whose lock we hold (rows of older schemas name none).
UPDATE nodes SET status = 'dead', ended_at = :now, waits = '[]'
 WHERE status IN ('starting', 'healthy', 'stopping') AND id <> :id
   AND ((:judge = 1 AND beat_at + lease_ms < :now) OR (coalesce(home, :home) = :home AND started_at <= :since))
RETURNING id, name, beat_at;

-- name: unreleased
SELECT * FROM nodes WHERE status IN ('stopped', 'dead') AND released = 0 ORDER BY ended_at;

-- name: node_released
UPDATE nodes SET released = 1 WHERE id = :id;

-- name: predecessor
-- The last node of this name that has ended and whose history nobody took over.
SELECT id FROM nodes WHERE name = :name AND id <> :id AND status IN ('stopped', 'dead') AND heir IS NULL
 ORDER BY coalesce(home, :home) = :home DESC, started_at DESC LIMIT 1;

-- name: inherit
UPDATE nodes SET heir = :heir WHERE id = :id AND heir IS NULL RETURNING id;

-- name: inherit_health
UPDATE health SET node = :heir WHERE node = :id;

-- name: inherit_exits
UPDATE exits SET node = :heir WHERE node = :id;

-- name: forget_nodes
DELETE FROM nodes WHERE status IN ('stopped', 'dead') AND released = 1 AND ended_at < :before RETURNING id;

-- name: forget_node_rows
DELETE FROM health WHERE node = :id;

-- name: declared_put
INSERT INTO declared (node, kind, name) VALUES (?, ?, ?) ON CONFLICT DO NOTHING;

-- name: declared_clear
DELETE FROM declared WHERE node = :node;

-- name: declared_drop
-- What nodes that have ended declared. Called by a node that lives.
DELETE FROM declared WHERE node NOT IN (SELECT id FROM nodes WHERE status IN ('starting', 'healthy', 'stopping'));

-- name: declare_task
INSERT INTO tasks (name, queue, attempts, timeout, priority, policy, parameters, declared_at)
VALUES (:name, :queue, :attempts, :timeout, :priority, :policy, :parameters, :now)
ON CONFLICT (name) DO UPDATE SET queue = excluded.queue, attempts = excluded.attempts, timeout = excluded.timeout,
       priority = excluded.priority, policy = excluded.policy, parameters = excluded.parameters, declared_at = excluded.declared_at,
       gone = 0;

-- name: tasks_gone
UPDATE tasks SET gone = 1 WHERE gone = 0 AND name NOT IN (SELECT name FROM declared WHERE kind = 'task');

-- name: tasks
SELECT name, queue, attempts, timeout, priority, policy, parameters FROM tasks WHERE gone = 0 ORDER BY name;

-- name: gone_tasks
SELECT name, queue FROM tasks WHERE gone = 1;

-- name: task_queues
SELECT DISTINCT queue FROM tasks WHERE gone = 0;

-- name: strangers
-- Tasks at the head of a queue that no node declares, or none has declared yet: whoever enqueued them has other code than every node.
SELECT DISTINCT task FROM (
    SELECT task FROM jobs WHERE status = 'queued' AND later = 0 AND behind = 0 AND queue = :queue
     ORDER BY priority DESC, coalesce(position, id), id LIMIT 100) AS head
 WHERE task NOT IN (SELECT name FROM tasks WHERE gone = 0);

-- name: stranger_put
INSERT INTO tasks (name, queue, attempts, parameters, declared_at, gone) VALUES (:name, :queue, 1, '[]', :now, 1) ON CONFLICT DO NOTHING;

-- name: declares
SELECT node FROM declared WHERE kind = 'task' AND name = :name;

-- name: park
-- Jobs of a task that no node declares leave the ready index, so that claims need not pass over them.
UPDATE jobs SET later = 2
 WHERE id IN (SELECT id FROM jobs WHERE status = 'queued' AND later = 0 AND behind = 0 AND queue = :queue AND task = :task LIMIT 1000)
RETURNING queue, limit_key;

-- name: unpark
UPDATE jobs SET later = 0, behind = limit_key IS NOT NULL
 WHERE id IN (SELECT id FROM jobs WHERE status = 'queued' AND later = 2
                 AND task IN (SELECT name FROM tasks WHERE gone = 0) LIMIT 1000)
RETURNING queue, limit_key;

-- name: unserved
SELECT task, queue, count(*) AS n FROM jobs WHERE status = 'queued' AND later = 2 AND task NOT IN (SELECT name FROM tasks WHERE gone = 0)
 GROUP BY task, queue;

-- name: schedules_gone
-- Nobody has declared them for so long that their app is not just being restarted.
DELETE FROM schedules WHERE next_at < :before AND paused = 0 AND name NOT IN (SELECT name FROM declared WHERE kind = 'schedule');

-- name: running_by_node
SELECT node, count(*) AS n FROM jobs WHERE status = 'processing' GROUP BY node;

-- name: orphans
SELECT j.node, count(*) AS n FROM jobs j LEFT JOIN nodes n ON n.id = j.node
 WHERE j.status = 'processing' AND (n.id IS NULL OR n.status IN ('stopped', 'dead')) GROUP BY j.node;

-- name: last_run
SELECT data FROM timeline WHERE job = :job AND name = 'processing' ORDER BY seq DESC LIMIT 1;

-- name: forget_node
DELETE FROM nodes WHERE id = :id AND status IN ('stopped', 'dead') AND released = 1 RETURNING id;

-- name: wish
INSERT INTO wishes (node, verb, target, asked_at) VALUES (:node, :verb, :target, :now) RETURNING id;

-- name: wishes
SELECT id, verb, target FROM wishes WHERE node = :node AND done_at IS NULL ORDER BY id;

-- name: wish_done
UPDATE wishes SET done_at = :now, answer = :answer WHERE id = :id AND done_at IS NULL RETURNING id;

-- name: wish_answer
SELECT done_at, answer FROM wishes WHERE id = :id;

-- name: forget_wishes
DELETE FROM wishes WHERE asked_at < :before;
