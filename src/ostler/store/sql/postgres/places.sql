-- Which models are where.

-- name: clear_places
DELETE FROM ostler.places WHERE node = :node
    OR node NOT IN (SELECT id FROM ostler.nodes WHERE status IN ('starting', 'healthy', 'stopping'));

-- name: put_places
INSERT INTO ostler.places (node, task, model, state, free, waiting, fits)
SELECT row ->> 0, row ->> 1, row ->> 2, row ->> 3, (row ->> 4)::int, (row ->> 5)::int, (row ->> 6)::int
  FROM jsonb_array_elements(:rows::jsonb) AS row;

-- name: places
SELECT p.node, n.name, n.url, p.task, p.model, p.state, p.free, p.waiting, p.fits
  FROM ostler.places AS p JOIN ostler.nodes AS n ON n.id = p.node
 WHERE n.status = 'healthy' AND n.beat_at + n.lease_ms >= :now ORDER BY p.node, p.task, p.model;
