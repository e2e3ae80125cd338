-- Sessions and the workers that take them. What writes a node's rows holds the lock sessions:<node>, so that counts stay true.

-- name: put_session_workers
-- A node that was declared dead announces nothing.
INSERT INTO session_workers (node, component, generation, pool, serves, address, slots, lifetime, served, status, wanted, versions, started_at, beat_at)
SELECT ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, 'serve', ?11, ?12, ?12
 WHERE EXISTS (SELECT 1 FROM nodes WHERE id = ?1 AND status IN ('starting', 'healthy', 'stopping'))
ON CONFLICT (node, component, generation) DO UPDATE SET pool = excluded.pool, serves = excluded.serves, address = excluded.address,
   slots = excluded.slots, lifetime = excluded.lifetime, served = max(served, excluded.served), status = excluded.status,
   versions = excluded.versions, beat_at = excluded.beat_at;

-- name: admit_sessions
-- As many as the worker has slots and lifetime for, in the order given. One that is in the table already is passed over.
INSERT INTO sessions (id, component, generation, pool, serves, owner, priority, client, agent, key, via, waited_ms, node, started_at, seen_at, bytes_in, bytes_out)
SELECT a.id, a.component, a.generation, a.pool, a.serves, a.owner, a.priority, a.client, a.agent, a.sticky, a.via, a.waited_ms, :node, :now, :now, 0, 0
  FROM (SELECT *, row_number() OVER (PARTITION BY component, generation ORDER BY place) AS nth
          FROM (SELECT j.key AS place, json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS component,
                       json_extract(value, '$[2]') AS generation, json_extract(value, '$[3]') AS pool, json_extract(value, '$[4]') AS serves,
                       json_extract(value, '$[5]') AS owner, json_extract(value, '$[6]') AS priority, json_extract(value, '$[7]') AS client,
                       json_extract(value, '$[8]') AS agent, json_extract(value, '$[9]') AS sticky, json_extract(value, '$[10]') AS via,
                       json_extract(value, '$[11]') AS waited_ms
                  FROM json_each(:wanted) AS j) AS given
         WHERE NOT EXISTS (SELECT 1 FROM sessions AS s WHERE s.id = given.id)) AS a
  JOIN session_workers AS w ON w.node = :node AND w.component = a.component AND w.generation = a.generation
 WHERE w.status = 'available' AND w.wanted = 'serve' AND (w.lifetime = 0 OR w.served + a.nth <= w.lifetime)
   AND a.nth + (SELECT count(*) FROM sessions AS s
                 WHERE s.node = :node AND s.component = a.component AND s.generation = a.generation AND s.ended_at IS NULL) <= w.slots
ON CONFLICT DO NOTHING
RETURNING id, component, generation;

-- name: count_served
UPDATE session_workers SET served = served + ?4 WHERE node = ?1 AND component = ?2 AND generation = ?3;

-- name: session_rooms
-- What the workers of a node have: to say why one took no session.
SELECT w.component, w.generation, w.slots, w.lifetime, w.served, w.status, w.wanted,
       (SELECT count(*) FROM sessions AS s
         WHERE s.node = w.node AND s.component = w.component AND s.generation = w.generation AND s.ended_at IS NULL) AS in_use
  FROM session_workers AS w WHERE w.node = :node;

-- name: sessions_of
SELECT id, node, component, generation, ended_at FROM sessions WHERE id IN (SELECT value FROM json_each(:ids));

-- name: end_sessions
UPDATE sessions SET ended_at = ?2, reason = ?3, text = ?4, code = ?5, bytes_in = ?6, bytes_out = ?7 WHERE id = ?1 AND ended_at IS NULL;

-- name: beat_session_workers
UPDATE session_workers SET beat_at = :now, status = b.status, served = max(served, b.seen)
  FROM (SELECT json_extract(value, '$[0]') AS component, json_extract(value, '$[1]') AS generation,
               json_extract(value, '$[2]') AS status, json_extract(value, '$[3]') AS seen FROM json_each(:batch)) AS b
 WHERE session_workers.node = :node AND session_workers.component = b.component AND session_workers.generation = b.generation
RETURNING component, generation, wanted;

-- name: seen_sessions
UPDATE sessions SET seen_at = :now, bytes_in = b.bytes_in, bytes_out = b.bytes_out
  FROM (SELECT json_extract(value, '$[0]') AS id, json_extract(value, '$[1]') AS bytes_in, json_extract(value, '$[2]') AS bytes_out
          FROM json_each(:batch)) AS b
 WHERE sessions.id = b.id AND sessions.ended_at IS NULL
RETURNING id;

-- name: end_strays
-- Live rows of a node that the node knows nothing of: their admission was in doubt, and given up.
UPDATE sessions SET ended_at = :now, reason = :reason, text = :text
 WHERE node = :node AND ended_at IS NULL AND id NOT IN (SELECT value FROM json_each(:ids)) RETURNING id;

-- name: add_sessions
-- A session whose node seemed to be lost, and was not, has its true end in the record.
INSERT INTO sessions (id, pool, serves, node, component, generation, owner, priority, client, agent, key, via, waited_ms, started_at, ended_at, reason, text, code, bytes_in, bytes_out, seen_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET ended_at = excluded.ended_at, reason = excluded.reason, text = excluded.text, code = excluded.code,
   bytes_in = excluded.bytes_in, bytes_out = excluded.bytes_out
 WHERE sessions.reason = 'node-lost' AND excluded.ended_at IS NOT NULL;

-- name: end_worker_sessions
UPDATE sessions SET ended_at = :now, reason = :reason, text = :text
 WHERE node = :node AND component = :component AND generation = :generation AND ended_at IS NULL RETURNING id;

-- name: drop_session_worker
DELETE FROM session_workers WHERE node = :node AND component = :component AND generation = :generation;

-- name: end_node_sessions
UPDATE sessions SET ended_at = :now, reason = :reason, text = :text WHERE node = :node AND ended_at IS NULL RETURNING id, component, generation;

-- name: drop_node_session_workers
DELETE FROM session_workers WHERE node = :node RETURNING component, generation, pool, beat_at;

-- name: session_nodes_gone
-- Nodes that have ended and have something here.
SELECT w.node FROM session_workers AS w WHERE w.node NOT IN (SELECT id FROM nodes WHERE status IN ('starting', 'healthy', 'stopping'))
 UNION
SELECT s.node FROM sessions AS s WHERE s.ended_at IS NULL AND s.node NOT IN (SELECT id FROM nodes WHERE status IN ('starting', 'healthy', 'stopping'));

-- name: session_workers
SELECT w.node, n.name, n.url, w.pool, w.serves, w.component, w.generation, w.address, w.slots, w.lifetime, w.served, w.status, w.wanted,
       w.versions, w.started_at, w.beat_at,
       (SELECT count(*) FROM sessions AS s
         WHERE s.node = w.node AND s.component = w.component AND s.generation = w.generation AND s.ended_at IS NULL) AS in_use
  FROM session_workers AS w JOIN nodes AS n ON n.id = w.node
 WHERE n.status IN ('starting', 'healthy', 'stopping') AND n.beat_at + n.lease_ms >= :now ORDER BY w.node, w.component, w.generation;

-- name: want_session_worker
UPDATE session_workers SET wanted = :wanted WHERE node = :node AND component = :component AND generation = :generation RETURNING node;

-- name: want_session_end
UPDATE sessions SET wanted = 'end' WHERE id = :id AND ended_at IS NULL RETURNING node;

-- name: session_orders
SELECT id FROM sessions WHERE node = :node AND ended_at IS NULL AND wanted = 'end';

-- name: sessions
SELECT id, pool, serves, node, component, generation, owner, priority, client, agent, key, via, waited_ms, started_at, ended_at, reason, text, code, bytes_in, bytes_out, seen_at
  FROM sessions WHERE {where} ORDER BY started_at DESC, id DESC LIMIT :limit;

-- condition: session_before
(started_at, id) < (:at, :before)

-- condition: session_id
id = :id

-- condition: session_pool
(pool = :pool OR serves = :pool)

-- condition: session_owner
owner = :owner

-- condition: session_component
component = :component

-- condition: session_node
node = :node

-- condition: session_live
ended_at IS NULL

-- condition: session_ended
ended_at IS NOT NULL

-- name: sessions_beyond
-- The newest of those that are too many.
SELECT ended_at, id FROM sessions WHERE ended_at IS NOT NULL ORDER BY ended_at DESC, id DESC LIMIT 1 OFFSET :kept;

-- name: purge_sessions
DELETE FROM sessions WHERE id IN (
  SELECT id FROM sessions WHERE ended_at IS NOT NULL AND (ended_at, id) <= (:at, :id) ORDER BY ended_at, id LIMIT :most) RETURNING id;
