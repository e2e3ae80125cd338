"""What `ostler doctor` asks a PostgreSQL server: its clock, what pins old rows, vacuum, indexes, connections, listeners, locks.

Sessions of other roles show what they do only to members of pg_monitor; without that right such checks say what they could see.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

from ostler.store import fleet, queries
from ostler.store.doctor import Finding, version
from ostler.store.postgres import PostgresDatabase
from ostler.store.store import Store

_INDEX = re.compile(r"^CREATE (?:UNIQUE )?INDEX (\w+) ON ostler\.\w+[^;]*;", re.MULTILINE | re.IGNORECASE)
_DROPPED = re.compile(r"^DROP INDEX (?:IF EXISTS )?ostler\.(\w+)", re.MULTILINE | re.IGNORECASE)


class Limits(NamedTuple):
    """From where on a finding is a warning."""

    round_trip: float = 0.02  # seconds
    skew: float = 1.0  # seconds
    pinned: float = 60.0  # seconds that a snapshot, or an idle transaction, may be old
    dead: int = 50_000  # rows of a table that wait to be vacuumed, when they are also more than the living ones
    connections: float = 0.8  # share of those that the server allows
    waiting: float = 5.0  # seconds that somebody waits for a lock


_SNAPSHOTS = """
SELECT pid, usename, application_name, coalesce(state, 'unknown') AS state,
       extract(epoch FROM clock_timestamp() - coalesce(xact_start, state_change))::float8 AS age
  FROM pg_stat_activity
 WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'
   AND ((backend_xmin IS NOT NULL AND xact_start < clock_timestamp() - make_interval(secs => %(pinned)s))
        OR (state LIKE 'idle in transaction%%' AND state_change < clock_timestamp() - make_interval(secs => %(pinned)s)))
 ORDER BY age DESC
"""
_HIDDEN = """
SELECT count(*) AS n FROM pg_stat_activity WHERE backend_type IS NULL AND datname = current_database()
"""
_PREPARED = """
SELECT gid, owner, extract(epoch FROM clock_timestamp() - prepared)::float8 AS age FROM pg_prepared_xacts
 WHERE prepared < clock_timestamp() - make_interval(secs => %(pinned)s)
"""
_SLOTS = "SELECT slot_name, slot_type, coalesce(wal_status, '') AS wal FROM pg_replication_slots WHERE NOT active"
_TABLES = """
SELECT s.relname AS name, s.n_live_tup AS live, s.n_dead_tup AS dead,
       extract(epoch FROM clock_timestamp() - s.last_autovacuum)::float8 AS vacuumed,
       coalesce(c.reloptions @> ARRAY['autovacuum_enabled=false'], false) AS off
  FROM pg_stat_user_tables s JOIN pg_class c ON c.oid = s.relid WHERE s.schemaname = %(schema)s ORDER BY s.n_dead_tup DESC
"""
_INDEXES = """
SELECT i.relname AS name, x.indisvalid AS valid FROM pg_index x JOIN pg_class i ON i.oid = x.indexrelid
  JOIN pg_namespace n ON n.oid = i.relnamespace WHERE n.nspname = %(schema)s
"""
_CONNECTIONS = """
SELECT (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' OR backend_type IS NULL) AS used,
       (SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'ostler%%' AND datname = current_database()) AS ours,
       current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int AS most
"""
_LISTENERS = """
SELECT count(*) AS n FROM pg_stat_activity
 WHERE application_name = 'ostler listens' AND datname = current_database() AND query = %(listen)s
"""
_LOCKS = """
SELECT l.pid, a.application_name, pg_blocking_pids(l.pid) AS by, extract(epoch FROM clock_timestamp() - l.waitstart)::float8 AS age
  FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
 WHERE NOT l.granted AND l.waitstart < clock_timestamp() - make_interval(secs => %(waiting)s) AND a.datname = current_database()
"""
_SYNCED = "SELECT current_setting('fsync') AS fsync, current_setting('synchronous_commit') AS commits"


def examine(store: Store, limits: Limits | None = None) -> Iterator[Finding]:
    """All checks, in the order in which one would read them."""
    db, limits = cast("PostgresDatabase", store.db), limits or Limits()
    yield from _server(db)
    yield _locks(db, limits)  # first: what is locked here may hold up what is read below
    yield _round_trip(db, limits)
    yield _clock(db, limits)
    yield _connections(db, limits)
    yield from _pinned(db, limits)
    yield from _tables(db, limits)
    yield from _indexes(db)
    yield _listeners(store, db)


def _server(db: PostgresDatabase) -> Iterator[Finding]:
    said, found = db.ask("SHOW server_version")[0][0], db.schema()
    text = f"{db.place.shown}, PostgreSQL {said}, schema {db.place.schema} version {found}"
    yield version(found, queries.newest(db.dialect), text)
    synced = db.ask(_SYNCED)[0]
    if "off" in (synced["fsync"], synced["commits"]):
        off = "fsync" if synced["fsync"] == "off" else "synchronous_commit"
        yield Finding(
            "warning", "durability", f"{off} is off: a power cut may lose jobs that were acknowledged; turn it on"
        )


def _round_trip(db: PostgresDatabase, limits: Limits) -> Finding:
    took = []
    for _ in range(5):
        began = time.perf_counter()
        db.ask("SELECT 1")
        took.append(time.perf_counter() - began)
    text = f"{min(took) * 1000:.1f} ms"
    if min(took) > limits.round_trip:
        return Finding("warning", "round trip", f"{text}: every claim waits for it; run nodes closer to the server")
    return Finding("ok", "round trip", text)


def _clock(db: PostgresDatabase, limits: Limits) -> Finding:
    before = time.time()
    theirs = db.ask("SELECT extract(epoch FROM clock_timestamp())::float8")[0][0]
    after = time.time()
    skew = (before + after) / 2 - theirs
    text = f"this machine is {abs(skew):.3f} s {'ahead of' if skew > 0 else 'behind'} the server"
    if abs(skew) > limits.skew:
        then = "schedules and times in logs are off by that; leases are not, the server's clock decides them. Check NTP on both"
        return Finding("warning", "clock", f"{text}: {then}")
    return Finding("ok", "clock", text)


def _connections(db: PostgresDatabase, limits: Limits) -> Finding:
    row = db.ask(_CONNECTIONS)[0]
    text = f"{row['used']} of {row['most']} in use, {row['ours']} of them by ostler in this database"
    if row["used"] > limits.connections * row["most"]:
        return Finding("warning", "connections", f"{text}; raise max_connections, or use a pooler (7 for each node)")
    return Finding("ok", "connections", text)


def _pinned(db: PostgresDatabase, limits: Limits) -> Iterator[Finding]:
    """What keeps vacuum from removing dead rows: claims get slower while it lasts."""
    asked = {"pinned": limits.pinned}
    found = [
        f"pid {r['pid']} ({r['usename']}, {r['application_name'] or 'no name'}, {r['state']}) for {r['age']:.0f} s"
        for r in db.ask(_SNAPSHOTS, asked)
    ]
    if found:
        then = "dead rows stay while they do: end them, or SELECT pg_terminate_backend(PID)"
        yield Finding("warning", "snapshots", f"transactions that hold an old snapshot: {'; '.join(found[:5])}. {then}")
    for row in db.ask(_PREPARED, asked):
        text = f"prepared transaction {row['gid']!r} of {row['owner']} waits for {row['age']:.0f} s"
        yield Finding(
            "warning", "snapshots", f"{text}: COMMIT PREPARED or ROLLBACK PREPARED it, dead rows stay until then"
        )
    for row in db.ask(_SLOTS):
        text = f"replication slot {row['slot_name']} ({row['slot_type']}) has no client"
        yield Finding(
            "warning", "snapshots", f"{text}: it keeps WAL and may keep dead rows; start its client or drop it"
        )
    hidden = db.ask(_HIDDEN)[0]["n"]
    if not found:
        unseen = f"; {hidden} sessions of other roles cannot be seen (GRANT pg_monitor TO …)" if hidden else ""
        yield Finding("ok", "snapshots", f"none is older than {limits.pinned:g} s{unseen}")


def _tables(db: PostgresDatabase, limits: Limits) -> Iterator[Finding]:
    rows = db.ask(_TABLES, {"schema": db.place.schema})
    if db.ask("SHOW autovacuum")[0][0] == "off":
        yield Finding(
            "warning", "vacuum", "autovacuum is off on this server: turn it on, or claims get slower and slower"
        )
    well = True
    for row in rows:
        ran = "never" if row["vacuumed"] is None else f"{row['vacuumed']:.0f} s ago"
        text = f"{row['name']} has {row['dead']:,} dead rows beside {row['live']:,} ({ran} vacuumed by itself)"
        if row["off"]:
            well = False
            table = f"{db.place.schema}.{row['name']}"
            yield Finding(
                "warning", "vacuum", f"autovacuum is off for {table}: ALTER TABLE {table} RESET (autovacuum_enabled)"
            )
        elif row["dead"] > max(limits.dead, row["live"]):
            well = False
            yield Finding(
                "warning", "vacuum", f"{text}: look for old snapshots, then VACUUM {db.place.schema}.{row['name']}"
            )
    if well and rows:
        worst = rows[0]
        yield Finding(
            "ok", "vacuum", f"at most {worst['dead']:,} dead rows ({worst['name']}, {worst['live']:,} living)"
        )


def _indexes(db: PostgresDatabase) -> Iterator[Finding]:
    wanted: dict[str, str] = {}
    for _, _, script in queries.migrations(db.dialect):
        wanted |= {m[1]: " ".join(m[0].split()) for m in _INDEX.finditer(script)}
        for name in _DROPPED.findall(script):
            wanted.pop(name, None)
    there = {row["name"]: row["valid"] for row in db.ask(_INDEXES, {"schema": db.place.schema})}
    schema = db.place.schema
    for name in sorted(wanted.keys() - there.keys()):
        remedy = wanted[name].replace("ostler.", f"{schema}.")
        yield Finding(
            "error", "indexes", f"{name} is missing: claims read whole tables without it. Make it again: {remedy}"
        )
    broken = sorted(name for name, valid in there.items() if not valid)
    for name in broken:
        yield Finding("error", "indexes", f"{name} is invalid and not used: REINDEX INDEX CONCURRENTLY {schema}.{name}")
    if not broken and wanted.keys() <= there.keys():
        yield Finding("ok", "indexes", f"all {len(there)} are there and valid")


def _listeners(store: Store, db: PostgresDatabase) -> Finding:
    living = len(fleet.read(store).living)
    if db.place.pooler:
        return Finding("ok", "listeners", "none: behind a pooler, new jobs are found by the poll")
    count = db.ask(_LISTENERS, {"listen": f"LISTEN {db.place.channel}"})[0]["n"]
    usage = db.ask("SELECT pg_notification_queue_usage()")[0][0]
    text = f"{count} for {living} {'node' if living == 1 else 'nodes'}"
    if usage > 0.1:
        then = "a session that listens is stuck in a transaction; see snapshots"
        return Finding("warning", "listeners", f"the server's queue of notifications is {usage:.0%} full: {then}")
    if count < living:
        then = "jobs wait for the poll there. Look at the node's log; behind a pooler, say pooler=1 in the store's URL"
        return Finding("warning", "listeners", f"{text}: some node does not listen, and {then}")
    return Finding("ok", "listeners", text)


def _locks(db: PostgresDatabase, limits: Limits) -> Finding:
    rows = db.ask(_LOCKS, {"waiting": limits.waiting})
    found = [_waits(row) for row in rows[:5]]
    if found:
        return Finding("warning", "locks", f"{'; '.join(found)}. End what holds it: SELECT pg_terminate_backend(PID)")
    return Finding("ok", "locks", f"nobody waits for longer than {limits.waiting:g} s")


def _waits(row: Any) -> str:
    holders = ", ".join(map(str, row["by"])) or "nobody that is known"
    return f"pid {row['pid']} ({row['application_name'] or 'no name'}) has waited for {row['age']:.0f} s for a lock that pid {holders} holds"
