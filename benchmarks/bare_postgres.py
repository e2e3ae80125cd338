"""PostgreSQL alone, without a node: do the claims hold, and what do they cost? docs/decisions/0011 has the findings.

python benchmarks/bare_postgres.py chaos [--broken]      three claiming processes, kills of them and of their backends
python benchmarks/bare_postgres.py snapshot [--hint]     a snapshot held open for minutes at 800 jobs/s
python benchmarks/bare_postgres.py plans                 EXPLAIN of the claim at 1,000, 200,000 and 1,000,000 queued rows
python benchmarks/bare_postgres.py cost                  jobs/s and WAL bytes per job: one wide table, or a narrow ready table
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import re
import signal
import sys
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import psycopg
import psycopg.sql

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.servers import Server

SCHEMA = """
CREATE TABLE jobs (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, task text NOT NULL, queue text NOT NULL, args text NOT NULL,
  priority int NOT NULL DEFAULT 0, attempts int NOT NULL, timeout float8,
  status text NOT NULL DEFAULT 'queued' CHECK (status IN ('queued', 'processing', 'done', 'failed', 'cancelled')),
  later smallint NOT NULL DEFAULT 0, run_at bigint, attempt int NOT NULL DEFAULT 0, crashes int NOT NULL DEFAULT 0,
  excused int NOT NULL DEFAULT 0, fence bigint NOT NULL DEFAULT 0, seq int NOT NULL DEFAULT 0, node text, worker text,
  backoff text, limit_key text, limit_max int, unique_key text, batch bigint, next text, cancel smallint NOT NULL DEFAULT 0,
  progress float8, stage text, result text, error text, created_at bigint NOT NULL, started_at bigint, finished_at bigint,
  position bigint, behind smallint NOT NULL DEFAULT 0, held int NOT NULL DEFAULT 0, wait_ms bigint, chain bigint, step int
) WITH (%(options)s);
CREATE INDEX jobs_ready   ON jobs (queue, task, (-priority), (coalesce(position, id)), id) WHERE status = 'queued' AND later = 0 AND behind = 0;
CREATE INDEX jobs_later   ON jobs (run_at) WHERE status = 'queued' AND later = 1;
CREATE INDEX jobs_claimed ON jobs (node, worker, id) WHERE status = 'processing';
CREATE INDEX jobs_limited ON jobs (limit_key) WHERE status = 'processing' AND limit_key IS NOT NULL;
CREATE INDEX jobs_ended   ON jobs (status, id) WHERE status IN ('failed', 'cancelled');
CREATE INDEX jobs_batch   ON jobs (batch) WHERE batch IS NOT NULL;
CREATE INDEX jobs_waiting ON jobs (queue, limit_key, (-priority), (coalesce(position, id)), id)
 WHERE status = 'queued' AND later = 0 AND limit_key IS NOT NULL;
CREATE INDEX jobs_heads   ON jobs (queue, limit_key) WHERE status = 'queued' AND later = 0 AND behind = 0 AND limit_key IS NOT NULL;
CREATE INDEX jobs_over    ON jobs (status, finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX jobs_chain   ON jobs (chain) WHERE chain IS NOT NULL;
CREATE TABLE job_events (job bigint, seq int, at bigint NOT NULL, name text NOT NULL, data text, PRIMARY KEY (job, seq));
CREATE TABLE uniques (key text PRIMARY KEY, job bigint NOT NULL, until bigint);
CREATE TABLE nodes (id text PRIMARY KEY, beat timestamptz NOT NULL);
"""
OPTIONS = (
    "fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, "
    "autovacuum_vacuum_insert_scale_factor = 0.1, autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 20000, "
    "autovacuum_vacuum_cost_delay = 0"
)
MS = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint"

ENQUEUE = f"""
INSERT INTO jobs (task, queue, args, attempts, limit_key, limit_max, behind, seq, created_at)
SELECT 'noop', %(queue)s, '{{"n": 1}}', 3, k, m, (k IS NOT NULL AND %(line)s)::int, 1, {MS} FROM unnest(%(keys)s::text[], %(most)s::int[]) AS t(k, m)
RETURNING id"""
READY = "status = 'queued' AND later = 0 AND behind = 0"
ORDER = "ORDER BY -priority, coalesce(position, id), id"
FROM = "(-priority, coalesce(position, id)) >= (%(rank)s::int, %(low)s::bigint)"
# The first of each task that the node has, merged; then those that no other node holds. `look` is how many are looked at: as many as
# are wanted, more where other nodes claim at the same time. Where a row is sought by its id, its state is compared in a way that
# matches no partial index: without statistics the planner takes such an index for tiny and reads all of it instead of the primary key.
PICK = f"""
SELECT id FROM jobs
 WHERE status = 'queued' AND later + behind = 0 AND id = ANY (ARRAY(
   SELECT w.id FROM unnest(%(tasks)s::text[]) AS t(task), LATERAL (
     SELECT id, -priority AS rank, coalesce(position, id) AS place FROM jobs
      WHERE {READY} AND queue = %(queue)s AND task = t.task AND {FROM} {ORDER} LIMIT %(look)s) AS w
    ORDER BY w.rank, w.place, w.id LIMIT %(look)s))
 {ORDER} LIMIT %(limit)s FOR UPDATE SKIP LOCKED"""
# One scan of an index without the task: quicker by a little, but slow behind many jobs of tasks that the node does not have.
SCAN = f"SELECT id FROM jobs WHERE {READY} AND queue = %(queue)s AND task = ANY (%(tasks)s::text[]) AND {FROM} {ORDER} LIMIT %(limit)s FOR UPDATE SKIP LOCKED"
SCAN_INDEX = f"DROP INDEX jobs_ready; CREATE INDEX jobs_ready ON jobs (queue, (-priority), (coalesce(position, id)), id) WHERE {READY}"
TAKE = f"""
UPDATE jobs SET status = 'processing', attempt = attempt + 1, fence = fence + 1, seq = seq + 1, node = %(node)s, worker = 'w1',
       started_at = {MS}, progress = NULL, stage = NULL"""
GIVEN = "RETURNING id, fence, seq, task, args, limit_key, -priority AS rank, coalesce(position, id) AS place"
CLAIM = f"WITH picked AS MATERIALIZED ({PICK}) {TAKE} WHERE id = ANY (ARRAY(SELECT id FROM picked)) {GIVEN}"
CLAIM_SCAN = CLAIM.replace(PICK, SCAN)
CLAIM_IDS = f"{TAKE} WHERE id = ANY (%(ids)s::bigint[]) AND status = 'queued' {GIVEN}"
PICK_KEYED = PICK.replace("SELECT id", "SELECT id, limit_key, limit_max", 1)
FINISH = f"""
UPDATE jobs SET status = 'done', result = 'null', finished_at = {MS}, seq = seq + 1, cancel = 0
  FROM unnest(%(ids)s::bigint[], %(fences)s::bigint[]) AS f(id, fence)
 WHERE jobs.id = f.id AND jobs.fence = f.fence AND jobs.status || '' = 'processing'
RETURNING jobs.id, jobs.seq, jobs.limit_key"""
EVENTS = f"INSERT INTO job_events (job, seq, at, name) SELECT j, s, {MS}, n FROM unnest(%s::bigint[], %s::int[], %s::text[]) AS t(j, s, n)"
# The lock is a statement of its own: the snapshot of the next one is taken after it was granted, so it sees what the last holder wrote.
LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(k, 8)) FROM (SELECT k FROM unnest(%s::text[]) AS t(k) ORDER BY hashtextextended(k, 8)) AS o"
TRY = "SELECT k FROM unnest(%s::text[]) AS t(k) WHERE pg_try_advisory_xact_lock(hashtextextended(k, 8))"
RUNNING = "SELECT limit_key, count(*) FROM jobs WHERE status = 'processing' AND limit_key = ANY (%s::text[]) GROUP BY limit_key"
LINE = """
SELECT id FROM unnest(%(keys)s::text[], %(room)s::int[]) AS t(k, room), LATERAL (
  SELECT id FROM jobs WHERE status = 'queued' AND later = 0 AND queue = %(queue)s AND limit_key = k
   ORDER BY -priority, coalesce(position, id), id LIMIT room FOR UPDATE SKIP LOCKED) AS w"""
DEMOTE = """
UPDATE jobs SET behind = 1 WHERE behind = 0 AND id = ANY (ARRAY(
  SELECT h.id FROM unnest(%(keys)s::text[]) AS t(k) JOIN jobs AS h ON h.queue = %(queue)s AND h.limit_key = k
   WHERE h.status = 'queued' AND h.later = 0 AND h.behind = 0 AND h.limit_key IS NOT NULL
     AND h.id <> (SELECT f.id FROM jobs AS f WHERE f.queue = h.queue AND f.limit_key = h.limit_key AND f.status = 'queued' AND f.later = 0
                   ORDER BY -f.priority, coalesce(f.position, f.id), f.id LIMIT 1)))"""
PROMOTE = """
UPDATE jobs SET behind = 0 WHERE behind = 1 AND id = ANY (ARRAY(
  SELECT (SELECT f.id FROM jobs AS f WHERE f.queue = %(queue)s AND f.limit_key = k AND f.status = 'queued' AND f.later = 0
           ORDER BY -f.priority, coalesce(f.position, f.id), f.id LIMIT 1) FROM unnest(%(keys)s::text[]) AS t(k)))"""
HOLDER = """
SELECT u.key FROM uniques u LEFT JOIN jobs j ON j.id = u.job
 WHERE u.key = ANY (%s::text[]) AND (u.until IS NOT NULL OR j.status IN ('queued', 'processing'))"""
REQUEUE = """
UPDATE jobs SET status = 'queued', behind = (limit_key IS NOT NULL)::int, node = NULL, worker = NULL, started_at = NULL,
       attempt = attempt - 1, seq = seq + 1
 WHERE status || '' = 'processing' AND node = ANY (%(nodes)s) AND id = ANY (%(ids)s::bigint[]) RETURNING id, seq, limit_key"""


WHOLE: dict[str, Any] = {"queue": "q", "tasks": ["noop", "other", "third"], "rank": -(2**31), "low": 0}


def fresh(server: Server, options: str = OPTIONS) -> str:
    name = server.create_database()
    server.sql(SCHEMA % {"options": options}, database=name)
    return server.url(name)


# ---- chaos


def enqueue(db: psycopg.Connection, jobs: list[tuple[str | None, int | None, str | None]], locked: bool = True) -> int:
    """Store (limit key, at once, unique key) each, in one transaction; how many were new."""
    with db.transaction():
        limits = sorted({k for k, _, _ in jobs if k})
        wanted = sorted({u for _, _, u in jobs if u})
        if locked and (limits or wanted):
            db.execute(LOCK, [[*(f"limit:{k}" for k in limits), *(f"unique:{u}" for u in wanted)]])
        taken = {k for (k,) in db.execute(HOLDER, [wanted])} if wanted else set()
        new = []
        for job in jobs:
            if job[2] not in taken:
                new.append(job)
                taken.add(job[2]) if job[2] else None
        if not new:
            return 0
        ids = [
            i
            for (i,) in db.execute(
                ENQUEUE, {"queue": "q", "keys": [k for k, _, _ in new], "most": [m for _, m, _ in new], "line": locked}
            )
        ]
        held = [(u, i) for (_, _, u), i in zip(new, ids, strict=True) if u]
        if held:
            db.execute(
                "INSERT INTO uniques SELECT * FROM unnest(%s::text[], %s::bigint[]) AS t(k, j) ON CONFLICT (key) DO UPDATE SET job = excluded.job",
                [[u for u, _ in held], [i for _, i in held]],
            )
            db.execute(
                "INSERT INTO unique_log SELECT * FROM unnest(%s::text[], %s::bigint[])",
                [[u for u, _ in held], [i for _, i in held]],
            )
        put_heads(db, limits if locked else ())
    return len(new)


def put_heads(db: psycopg.Connection, keys: Any, added: bool = True) -> None:
    """Under the locks of these keys. A claim only takes from the line, so it demotes nobody, and so it waits for nobody."""
    if keys:
        if added:
            db.execute(DEMOTE, {"queue": "q", "keys": sorted(keys)})
        db.execute(PROMOTE, {"queue": "q", "keys": sorted(keys)})


def claim(db: psycopg.Connection, node: str, many: int, locked: bool) -> list[Any]:
    """It waits for no lock, so it is part of no deadlock: keys and rows that others hold now are passed over."""
    heads = db.execute(PICK_KEYED, {**WHOLE, "limit": many, "look": 4 * many}).fetchall()
    ids, most = [i for i, k, _ in heads if k is None], {k: m for _, k, m in heads if k is not None}
    if most:
        keys = (
            [k.removeprefix("limit:") for (k,) in db.execute(TRY, [[f"limit:{k}" for k in sorted(most)]])]
            if locked
            else sorted(most)
        )
        running = dict(db.execute(RUNNING, [keys]).fetchall()) if keys else {}
        room = {k: most[k] - running.get(k, 0) for k in keys if most[k] > running.get(k, 0)}
        if room:
            line = db.execute(LINE, {"queue": "q", "keys": list(room), "room": list(room.values())})
            ids += [i for (i,) in line][: max(0, many - len(ids))]
    rows = db.execute(CLAIM_IDS, {"ids": ids, "node": node}).fetchall() if ids else []
    put_heads(db, {r[5] for r in rows if r[5]}, added=False)
    db.execute("INSERT INTO runs (job, fence, key, began) SELECT j, f, k, clock_timestamp() FROM unnest(%s::bigint[], %s::bigint[], %s::text[]) AS t(j, f, k)",
               [[r[0] for r in rows], [r[1] for r in rows], [r[5] for r in rows]])  # fmt: skip
    return rows


def end_runs(db: psycopg.Connection, ids: list[int], how: str) -> None:
    db.execute(
        "UPDATE runs SET ended = clock_timestamp(), how = %s WHERE job = ANY (%s::bigint[]) AND ended IS NULL",
        [how, ids],
    )


def node(url: str, locked: bool, lease: float) -> None:
    """Turns: results out, claims in, one transaction. A lost connection is opened again, and the turn is written again."""
    me, hand = "", []
    while True:
        try:
            with psycopg.connect(url, autocommit=True, application_name="node") as db:
                while True:
                    with db.transaction():
                        if (
                            not me
                            or not db.execute(
                                "UPDATE nodes SET beat = now() WHERE id = %s RETURNING 1", [me]
                            ).fetchone()
                        ):
                            me, hand = str(uuid.uuid4()), []  # declared dead: what it had in hand runs elsewhere
                            db.execute("INSERT INTO nodes VALUES (%s, now())", [me])
                        done = db.execute(
                            FINISH, {"ids": [r[0] for r in hand], "fences": [r[1] for r in hand]}
                        ).fetchall()
                        end_runs(db, [d[0] for d in done], "done")
                        taken = claim(db, me, random.choice((1, 4, 16)), locked)
                        names = [(d[0], d[1], "done") for d in done] + [(r[0], r[2], "processing") for r in taken]
                        db.execute(EVENTS, [list(part) for part in zip(*names, strict=True)] if names else [[], [], []])
                    hand = taken
                    time.sleep(random.random() * 0.004)
                    if random.random() < 0.05:
                        sweep(db, lease)
        except psycopg.errors.DeadlockDetected:
            raise
        except psycopg.OperationalError:
            time.sleep(0.02)


def sweep(db: psycopg.Connection, lease: float) -> None:
    with db.transaction():
        dead = db.execute(
            "DELETE FROM nodes WHERE id = ANY (ARRAY(SELECT id FROM nodes WHERE beat < now() - %s * interval '1 s' FOR UPDATE SKIP LOCKED)) RETURNING id",
            [lease],
        ).fetchall()
        names = [name for (name,) in dead]
        held = db.execute(
            "SELECT id, limit_key FROM jobs WHERE status = 'processing' AND node = ANY (%s)", [names]
        ).fetchall()
        keys = sorted({k for _, k in held if k})
        if keys:
            db.execute(LOCK, [[f"limit:{k}" for k in keys]])
        rows = db.execute(REQUEUE, {"nodes": names, "ids": [i for i, _ in held]}).fetchall()
        end_runs(db, [r[0] for r in rows], "requeued")
        db.execute(EVENTS, [[r[0] for r in rows], [r[1] for r in rows], ["requeued"] * len(rows)])
        put_heads(db, keys)


def producer(url: str, count: int, seed: int, locked: bool, stored: Any) -> None:
    """Jobs in small batches: a third with a limit key, a tenth unique. A lost connection is opened again."""
    chance, left = random.Random(seed), count
    while left > 0:
        try:
            with psycopg.connect(url, autocommit=True, application_name="producer") as db:
                while left > 0:
                    jobs = []
                    for _ in range(min(left, chance.choice((1, 5, 50)))):
                        key = f"k{chance.randrange(30)}" if chance.random() < 0.33 else None
                        jobs.append(
                            (
                                key,
                                1 + int(key[1:]) % 3 if key else None,
                                f"u{chance.randrange(40)}" if chance.random() < 0.1 else None,
                            )
                        )
                    new = enqueue(db, jobs, locked)
                    left -= len(jobs)
                    with stored.get_lock():
                        stored.value += new
        except psycopg.OperationalError as lost:
            if isinstance(lost, psycopg.errors.DeadlockDetected):
                raise
            time.sleep(0.02)


def chaos(arguments: argparse.Namespace) -> None:
    with Server(arguments.version) as server:
        url = fresh(server)
        name = url.split("/")[3].split("?")[0]
        server.sql(
            "CREATE TABLE runs (job bigint, fence bigint, key text, began timestamptz, ended timestamptz, how text, PRIMARY KEY (job, fence));"
            "CREATE TABLE unique_log (key text, job bigint)",
            database=name,
        )
        locked, stored = not arguments.broken, multiprocessing.Value("q", 0)
        start, began = multiprocessing.get_context("fork").Process, time.monotonic()
        producers = [start(target=producer, args=(url, arguments.jobs // 2, seed, locked, stored)) for seed in (1, 2)]
        nodes = [start(target=node, args=(url, locked, 1.0)) for _ in range(3)]
        for process in producers + nodes:
            process.start()
        kills = Counter()
        watch = psycopg.connect(url, autocommit=True)
        while True:
            time.sleep(0.15)
            left = watch.execute("SELECT count(*) FROM jobs WHERE status <> 'done'").fetchone()[0]
            if not left and not any(p.is_alive() for p in producers):
                break
            if time.monotonic() - began > arguments.limit:
                print(
                    f"stuck with {left} jobs",
                    watch.execute("SELECT status, behind, count(*) FROM jobs GROUP BY 1, 2").fetchall(),
                )
                break
            if random.random() < 0.25:
                which = random.randrange(3)
                os.kill(nodes[which].pid, signal.SIGKILL)
                nodes[which].join()
                nodes[which] = start(target=node, args=(url, locked, 1.0))
                nodes[which].start()
                kills["node"] += 1
            else:
                watch.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name IN ('node', 'producer') ORDER BY random() LIMIT 1"
                )
                kills["backend"] += 1
            for p in [*nodes, *producers]:
                if p.exitcode not in (None, 0, -9):
                    raise SystemExit(f"a process failed with {p.exitcode}")
        for process in nodes:
            process.kill()
            process.join()
        report_chaos(watch, kills, stored.value, time.monotonic() - began)
        watch.close()


def report_chaos(db: psycopg.Connection, kills: Counter[str], stored: int, took: float) -> None:
    one = lambda sql: db.execute(sql).fetchone()[0]  # noqa: E731
    db.execute("CREATE INDEX ON runs (key, began); CREATE INDEX ON unique_log (key); ANALYZE")
    total = one("SELECT count(*) FROM jobs")
    print(
        f"{total} jobs in {took:.0f} s, {dict(kills)} killed, {one('SELECT count(*) FROM runs')} runs, {one('SELECT count(*) FROM runs WHERE ended IS NULL')} without an end"
    )
    checks = {
        "jobs acknowledged and not stored": max(0, stored - total),
        "jobs not done": one("SELECT count(*) FROM jobs WHERE status <> 'done'"),
        "completions written twice": one(
            "SELECT count(*) FROM (SELECT job FROM job_events WHERE name = 'done' GROUP BY job HAVING count(*) <> 1) AS t"
        ),
        "timelines with gaps": one(
            "SELECT count(*) FROM jobs j WHERE seq <> 1 + (SELECT count(*) FROM job_events e WHERE e.job = j.id)"
        ),
        "more than at_once of a key": one(
            "SELECT count(*) FROM runs a WHERE key IS NOT NULL AND (SELECT count(*) FROM runs b WHERE b.key = a.key AND b.began <= a.began AND b.ended > a.began)"
            " > 1 + substr(key, 2)::int %% 3".replace("%%", "%")
        ),
        "two live jobs of a unique key": one(
            "SELECT count(*) FROM unique_log u JOIN unique_log v ON u.key = v.key AND u.job < v.job JOIN jobs a ON a.id = u.job JOIN jobs b ON b.id = v.job"
            " WHERE b.created_at < a.finished_at"
        ),
    }
    for what, n in checks.items():
        print(f"  {'ok ' if n == 0 else 'BAD'} {what}: {n}")


# ---- a held snapshot


class Scan:
    """Where a claim starts to look. Entries of claimed jobs stay in the index while an old snapshot may still need them, and a scan
    from the beginning passes all of them. So once that is slow, claims start where the last full scan found its first job, and a
    full scan comes again after 250 ms, or ten times what the last one took.
    """

    def __init__(self, hinted: bool) -> None:
        self.hinted, self.cost, self.again = hinted, 0.0, 0.0
        self.low = self.seen = (-(2**31), 0)

    def claim(self, db: psycopg.Connection, node: str, many: int) -> list[Any]:
        begun = time.monotonic()
        full = not self.hinted or self.cost < 0.005 or begun >= self.again
        rank, low = (-(2**31), 0) if full else self.low
        rows = db.execute(
            CLAIM, {**WHOLE, "rank": rank, "low": low, "limit": many, "look": 3 * many, "node": node}, prepare=True
        ).fetchall()
        places = [(r[6], r[7]) for r in rows]
        self.seen = max([self.seen, *places])
        if full:
            self.cost = time.monotonic() - begun
            self.again = begun + max(0.25, 10 * self.cost)
            self.low = min(places, default=self.seen)
        return rows


def drainer(url: str, hinted: bool, figures: Any) -> None:
    """Turns as a node makes them. Figures of each: when, jobs done, ms of the claim, ms of the turn, ms of one counter."""
    with psycopg.connect(url, autocommit=True) as db:
        me, hand, scan = str(os.getpid()), [], Scan(hinted)
        while True:
            begun = time.monotonic()
            with db.transaction():
                done = db.execute(
                    FINISH, {"ids": [r[0] for r in hand], "fences": [r[1] for r in hand]}, prepare=True
                ).fetchall()
                at = time.monotonic()
                hand = scan.claim(db, me, 100)
                claimed = time.monotonic() - at
                rows = [(d[0], d[1], "done") for d in done] + [(r[0], r[2], "processing") for r in hand]
                if rows:
                    db.execute(EVENTS, [list(part) for part in zip(*rows, strict=True)], prepare=True)
                at = time.monotonic()
                if rows:
                    db.execute(
                        "INSERT INTO depths VALUES (%s, %s) ON CONFLICT (node) DO UPDATE SET n = depths.n + excluded.n",
                        [me, len(rows)],
                    )
                counted = time.monotonic() - at
            figures.put((begun, len(done), claimed * 1000, (time.monotonic() - begun) * 1000, counted * 1000))
            time.sleep(0.02)


def feeder(url: str, rate: int) -> None:
    with psycopg.connect(url, autocommit=True) as db:
        begun, sent = time.monotonic(), 0
        while True:
            many = int((time.monotonic() - begun) * rate) - sent
            if many:
                db.execute(
                    ENQUEUE, {"queue": "q", "keys": [None] * many, "most": [None] * many, "line": True}, prepare=True
                )
                sent += many
            time.sleep(0.05)


def snapshot(arguments: argparse.Namespace) -> None:
    with Server(arguments.version, fsync=arguments.fsync) as server:
        url = fresh(server)
        start, figures = multiprocessing.get_context("fork").Process, multiprocessing.Queue()
        with psycopg.connect(url, autocommit=True) as db:
            db.execute("CREATE TABLE depths (node text PRIMARY KEY, n bigint) WITH (fillfactor = 10)")
            work = [start(target=drainer, args=(url, arguments.hint, figures)) for _ in range(2)]
            work.append(start(target=feeder, args=(url, arguments.rate)))
            for process in work:
                process.start()
            print(
                f"PostgreSQL {server.major}, {arguments.rate} jobs/s, hint {arguments.hint}, snapshot held: {not arguments.free}"
            )
            for window in range(1 + int(arguments.seconds / 30)):
                if window == 1 and not arguments.free:  # the first window is without
                    held = psycopg.connect(url)
                    held.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                    held.execute("SELECT count(*) FROM jobs WHERE status = 'queued'")
                time.sleep(30)
                report_window(db, window, figures)
            for process in work:
                process.kill()
                process.join()
            left_overs(db)


def report_window(db: psycopg.Connection, window: int, figures: Any) -> None:
    rows = []
    while not figures.empty():
        rows.append(figures.get())
    if not rows:
        return
    part = lambda i, q: sorted(r[i] for r in rows)[int(q * (len(rows) - 1))]  # noqa: E731
    backlog = db.execute("SELECT count(*) FROM jobs WHERE status = 'queued'").fetchone()[0]
    dead = db.execute("SELECT n_dead_tup FROM pg_stat_user_tables WHERE relname = 'jobs'").fetchone()[0]
    size = db.execute("SELECT pg_relation_size('jobs_ready') / 1024").fetchone()[0]
    print(
        f"  {window * 30:3d} s: {sum(r[1] for r in rows) / 30:5.0f} done/s, backlog {backlog:6d}, claim p50 {part(2, 0.5):6.1f} p95 {part(2, 0.95):6.1f} ms, "
        f"turn p50 {part(3, 0.5):6.1f} ms, counter p50 {part(4, 0.5):6.2f} p95 {part(4, 0.95):6.2f} ms, dead {dead}, jobs_ready {size} kB",
        flush=True,
    )


def left_overs(db: psycopg.Connection) -> None:
    """What else walks over entries that cannot be removed, measured while the snapshot is still held."""
    for what, sql in {
        "count of running jobs of one node": "SELECT count(*) FROM jobs WHERE status = 'processing' AND node = (SELECT min(node) FROM depths)",
        "is anything ready": "SELECT EXISTS (SELECT 1 FROM jobs WHERE status = 'queued' AND later = 0 AND behind = 0 AND queue = 'q')",
    }.items():
        at = time.monotonic()
        db.execute(sql)
        print(f"  {what}: {(time.monotonic() - at) * 1000:.1f} ms")


# ---- plans


def fill(db: psycopg.Connection, queued: int, task: str = "noop") -> None:
    db.execute(
        "INSERT INTO jobs (task, queue, args, attempts, seq, created_at) SELECT %s, 'q', '{}', 3, 1, 1 FROM generate_series(1, %s)",
        [task, queued],
    )


def explained(db: psycopg.Connection, sql: str) -> str:
    """The plan with a generic plan and with one for these values: which scans, blocks, time of the best of five."""
    values = {**WHOLE, "limit": 100, "look": 100, "node": "n"}
    out = []
    for mode in ("force_custom_plan", "force_generic_plan"):
        order: list[str] = []
        numbered = re.sub(
            r"%\((\w+)\)s",
            lambda m: f"${(order.append(m[1]) if m[1] not in order else None, order.index(m[1]) + 1)[1]}",
            sql,
        )
        types = {
            "queue": "text",
            "rank": "int",
            "low": "bigint",
            "limit": "bigint",
            "look": "bigint",
            "node": "text",
            "tasks": "text[]",
        }
        best = None
        with db.transaction(force_rollback=True):
            db.execute(f"SET LOCAL plan_cache_mode = {mode}")
            db.execute(f"PREPARE c ({', '.join(types[n] for n in order)}) AS {numbered}")
            call = "c (" + ", ".join(psycopg.sql.Literal(values[n]).as_string(db) for n in order) + ")"
            for _ in range(5):
                with db.transaction(force_rollback=True):
                    plan = db.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) EXECUTE {call}").fetchone()[0][0]
                    best = min(best or plan, plan, key=lambda p: p["Execution Time"])
            db.execute("DEALLOCATE c")
        scans: list[str] = []
        walk(best["Plan"], scans)
        blocks = best["Plan"]["Shared Hit Blocks"] + best["Plan"]["Shared Read Blocks"]
        out.append(f"{mode[6:-5]}: {best['Execution Time']:.2f} ms, {blocks} blocks, {' / '.join(scans)}")
    return "\n      ".join(out)


def walk(plan: dict[str, Any], scans: list[str]) -> None:
    if "Scan" in plan["Node Type"] or plan["Node Type"] == "Sort":
        scans.append(plan["Node Type"] + (f" {plan['Index Name']}" if "Index Name" in plan else ""))
    for part in plan.get("Plans", []):
        walk(part, scans)


def plans(arguments: argparse.Namespace) -> None:
    with Server(arguments.version) as server:
        print(f"PostgreSQL {server.major}, claim of 100")
        for queued, strange in ((1_000, 0), (200_000, 0), (1_000_000, 0), (1_000, 200_000)):
            for statistics in ("never analysed", "stale", "fresh"):
                url = fresh(server, "autovacuum_enabled = false")
                with psycopg.connect(url, autocommit=True) as db:
                    if statistics == "stale":  # from when everything was done
                        fill(db, 1000)
                        db.execute("UPDATE jobs SET status = 'done', finished_at = 1")
                        db.execute("VACUUM ANALYZE jobs")
                    fill(db, strange, "strange")
                    fill(db, queued)
                    if statistics == "fresh":
                        db.execute("ANALYZE jobs")
                    print(
                        f"  {queued} queued, {strange} of a task of nobody before them, {statistics}:\n      {explained(db, CLAIM)}",
                        flush=True,
                    )
                    if arguments.scan:
                        db.execute(SCAN_INDEX)
                        print(f"    one scan:\n      {explained(db, CLAIM_SCAN)}", flush=True)
                server.drop_database(url.split("/")[3].split("?")[0])


# ---- cost

NARROW = """
CREATE TABLE ready (queue text, rank int, place bigint, id bigint, PRIMARY KEY (queue, rank, place, id))
  WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE TABLE claims (id bigint PRIMARY KEY, fence bigint, node text, worker text, started_at bigint, attempt int)
  WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX claims_node ON claims (node, worker, id);
DROP INDEX jobs_ready; DROP INDEX jobs_claimed;
"""
NARROW_ENQUEUE = f"WITH j AS ({ENQUEUE}) INSERT INTO ready SELECT %(queue)s, 0, id, id FROM j"
NARROW_CLAIM = f"""
WITH picked AS MATERIALIZED (SELECT id FROM ready WHERE queue = %(queue)s AND (rank, place) >= (%(rank)s::int, %(low)s::bigint)
  ORDER BY rank, place, id LIMIT %(limit)s FOR UPDATE SKIP LOCKED),
gone AS (DELETE FROM ready WHERE queue = %(queue)s AND id = ANY (ARRAY(SELECT id FROM picked)) AND rank = 0 AND place = ANY (ARRAY(SELECT id FROM picked)) RETURNING id),
held AS (INSERT INTO claims SELECT j.id, j.fence + 1, %(node)s, 'w1', {MS}, j.attempt + 1 FROM jobs j JOIN gone USING (id) RETURNING id, fence)
SELECT h.id, h.fence, j.seq + 1, j.task, j.args FROM held h JOIN jobs j USING (id)"""
NARROW_FINISH = f"""
WITH f AS (SELECT * FROM unnest(%(ids)s::bigint[], %(fences)s::bigint[]) AS f(id, fence)),
gone AS (DELETE FROM claims c USING f WHERE c.id = f.id AND c.fence = f.fence RETURNING c.*)
UPDATE jobs SET status = 'done', result = 'null', finished_at = {MS}, started_at = gone.started_at, fence = gone.fence, attempt = gone.attempt,
       node = gone.node, worker = gone.worker, seq = seq + 2 FROM gone WHERE jobs.id = gone.id RETURNING jobs.id, jobs.seq, jobs.limit_key"""


def mover(url: str, way: str, batch: int, events: bool, begin: Any, seconds: float, out: Any) -> None:
    claim_, finish = {"narrow": (NARROW_CLAIM, NARROW_FINISH), "scan": (CLAIM_SCAN, FINISH)}.get(way, (CLAIM, FINISH))
    with psycopg.connect(url, autocommit=True) as db:
        hand, done, times = [], 0, []
        begin.wait()
        started = time.monotonic()
        while time.monotonic() < started + seconds:
            values = {**WHOLE, "limit": batch, "look": 3 * batch, "node": str(os.getpid())}
            with db.transaction():
                ended = (
                    db.execute(
                        finish, {"ids": [r[0] for r in hand], "fences": [r[1] for r in hand]}, prepare=True
                    ).fetchall()
                    if hand
                    else []
                )
                at = time.monotonic()
                if way == "two":
                    ids = [i for (i,) in db.execute(PICK, values, prepare=True)]
                    hand = db.execute(CLAIM_IDS, {**values, "ids": ids}, prepare=True).fetchall()
                else:
                    hand = db.execute(claim_, values, prepare=True).fetchall()
                times.append(time.monotonic() - at)
                rows = [(d[0], d[1], "done") for d in ended] + [(r[0], r[2], "processing") for r in hand]
                if rows and events:
                    db.execute(EVENTS, [list(part) for part in zip(*rows, strict=True)], prepare=True)
            done += len(ended)
            if not hand and not ended:
                break
        out.put((done, sorted(times)[len(times) // 2] * 1000, time.monotonic() - started))


def cost(arguments: argparse.Namespace) -> None:
    with Server(arguments.version, fsync=arguments.fsync) as server:
        for way, batch, options in [tuple(w.split(":", 2)) for w in arguments.ways]:
            url = fresh(server, OPTIONS.replace("fillfactor = 70", options or "fillfactor = 70"))
            with psycopg.connect(url, autocommit=True) as db:
                if way == "narrow":
                    db.execute(NARROW)
                if way == "scan":
                    db.execute(SCAN_INDEX)
                wal = lambda: db.execute("SELECT pg_current_wal_insert_lsn() - '0/0'").fetchone()[0]  # noqa: E731
                first, at = wal(), time.monotonic()
                for _ in range(arguments.jobs // 1000):
                    db.execute(
                        NARROW_ENQUEUE if way == "narrow" else ENQUEUE,
                        {"queue": "q", "keys": [None] * 1000, "most": [None] * 1000, "line": True},
                    )
                stored, filled = wal(), time.monotonic() - at
                start, begin, out = (
                    multiprocessing.get_context("fork").Process,
                    multiprocessing.Event(),
                    multiprocessing.Queue(),
                )
                work = [
                    start(target=mover, args=(url, way, int(batch), True, begin, arguments.seconds, out))
                    for _ in range(arguments.movers)
                ]
                for process in work:
                    process.start()
                time.sleep(0.3)
                begin.set()
                got = [out.get() for _ in work]
                for process in work:
                    process.join()
                done, took = sum(n for n, _, _ in got), max(t for _, _, t in got)
                hot = (
                    db.execute(
                        "SELECT pg_stat_force_next_flush(), n_tup_upd, n_tup_hot_upd, n_dead_tup FROM pg_stat_user_tables WHERE relname = 'jobs'"
                    ).fetchone()[1:]
                    if server.major >= 15
                    else ()
                )
                print(
                    f"  {way}, batch {batch}, {options or 'fillfactor = 70'}: {done / took:6.0f} jobs/s by {arguments.movers}, claim p50 {max(t for _, t, _ in got):.2f} ms, "
                    f"WAL {(stored - first) / arguments.jobs:.0f} B/enqueue + {(wal() - stored) / max(1, done):.0f} B/claim and finish, enqueue {arguments.jobs / filled:.0f}/s, updates, HOT, dead {hot}",
                    flush=True,
                )
            server.drop_database(url.split("/")[3].split("?")[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["chaos", "snapshot", "plans", "cost"])
    parser.add_argument("--version", type=int, help="the major version; the newest here unless told")
    parser.add_argument("--broken", action="store_true", help="chaos without the locks: the checks must find it")
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--limit", type=float, default=240, help="seconds after which chaos gives up")
    parser.add_argument("--hint", action="store_true")
    parser.add_argument("--scan", action="store_true", help="plans of the rejected claim, too")
    parser.add_argument("--free", action="store_true", help="no snapshot is held")
    parser.add_argument("--rate", type=int, default=800)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--movers", type=int, default=2)
    parser.add_argument("--fsync", default="on")
    parser.add_argument(
        "--ways",
        nargs="*",
        default=["one:100:", "two:100:", "scan:100:", "narrow:100:", "one:16:", "scan:16:", "narrow:16:"],
        help="way:batch:storage options",
    )
    arguments = parser.parse_args()
    if arguments.what != "plans":  # else a plan made while the table was tiny goes on to read all of it when it is not
        os.environ["PGOPTIONS"] = "-c enable_seqscan=off"
    {"chaos": chaos, "snapshot": snapshot, "plans": plans, "cost": cost}[arguments.what](arguments)


if __name__ == "__main__":
    main()
