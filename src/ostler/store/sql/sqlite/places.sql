-- Which models are where.

-- name: clear_places
DELETE FROM places WHERE node = :node OR node NOT IN (SELECT id FROM nodes WHERE status IN ('starting', 'healthy', 'stopping'));

-- name: put_places
INSERT INTO places (node, task, model, state, free, waiting, fits) VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: places
SELECT p.node, n.name, n.url, p.task, p.model, p.state, p.free, p.waiting, p.fits
  FROM places AS p JOIN nodes AS n ON n.id = p.node
 WHERE n.status = 'healthy' AND n.beat_at + n.lease_ms >= :now ORDER BY p.node, p.task, p.model;
