"""From SQLite to PostgreSQL: everything that a store knows, with its ids, in chunks that can be interrupted.

Each chunk is one transaction of the target, together with how far the copy is, so a copy that was killed goes on where it was. If the
source changed in between, it begins anew. Until it is finished nobody else can open the target. The source stays as it is, and nobody
can write there meanwhile.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import psycopg

from ostler.errors import ConfigError, Conflict
from ostler.store.identity import LIVE
from ostler.store.postgres import FILLING, PostgresDatabase
from ostler.store.sqlite import SqliteDatabase
from ostler.store.store import Store

# Each table and its key, in whose order it is read. Jobs come after what hangs on them.
TABLES: dict[str, tuple[str, ...]] = {
    "meta": ("key",),
    "tasks": ("name",),
    "schedules": ("name",),
    "batches": ("id",),
    "steps": ("chain", "n"),
    "uniques": ("key",),
    "rates": ("queue",),
    "purged": ("job",),
    "artifacts": ("job", "key", "home"),
    "tallies": ("step", "at", "queue", "name"),
    "incidents": ("node", "id"),
    "footprints": ("task", "model", "env", "device"),
    "calls": ("id", "node"),
    "sessions": ("id",),
    "exits": ("id",),
    "health": ("node", "component"),
    "declared": ("node", "kind", "name"),
    "nodes": ("id",),
    "job_events": ("job", "seq"),
    "job_errors": ("job", "seq"),
    "jobs": ("id",),
}
LEFT = ("wishes", "depths", "places", "session_workers", "waiters")
"""What operators wanted of nodes that run no more, and what those had; and counters, which are counted anew."""

_OWN_META = ("copy", "copied", "counted", "purged")  # what a store notes about itself
_ADDED = {"tallies": {"part": 0}}  # columns that only the target has
_NUMBERED = ("jobs", "batches", "exits", "wishes")
_ROWS, _BYTES = 10_000, 16_000_000  # of one chunk
_STATE = """
SELECT (SELECT json_array(count(*), max(id), sum(seq), sum(fence), sum(held), sum(later), sum(status = 'queued')) FROM jobs),
       (SELECT count(*) FROM job_events), (SELECT json_array(count(*), sum(pending)) FROM batches), (SELECT max(id) FROM exits),
       (SELECT json_group_array(name || next_at) FROM schedules), (SELECT count(*) FROM uniques),
       (SELECT json_group_array(key || value) FROM meta), (SELECT max(beat_at) FROM nodes), (SELECT sum(n) FROM tallies)
"""

Key = list[Any]
Report = Callable[[str, int, int], None]
"""(table, rows copied, rows in all)."""


class Summary(NamedTuple):
    """What a copy did. `already`: it had been finished before, and nothing was done."""

    tables: dict[str, int]
    jobs: dict[str, dict[str, int]]
    requeued: int = 0
    resumed: bool = False
    already: bool = False


class Source(SqliteDatabase):
    """The store that is copied."""

    def columns(self, table: str) -> list[str]:
        return [row["name"] for row in self._query(f"PRAGMA table_info({table})", {})]

    def state(self) -> str:
        """A text that differs when the store does."""
        return json.dumps([*self._query(_STATE, {})[0]])

    def rows(self, table: str, columns: Sequence[str], after: Key | None) -> list[tuple[Any, ...]]:
        """The next rows in the order of the key: as many as one chunk has. A NUL in a text becomes U+FFFD, as with every write."""
        key = ", ".join(TABLES[table])
        beyond = f"WHERE ({key}) > ({', '.join('?' * len(after))})" if after else ""
        sql = f"SELECT {', '.join(columns)} FROM {table} {beyond} ORDER BY {key}"  # noqa: S608  names of ours
        found, size = [], 0
        for row in self._connection.execute(sql, after or ()):
            values = tuple(row)
            text = "".join([value for value in values if value.__class__ is str])
            found.append(values if "\x00" not in text else tuple(_storable(value) for value in values))
            size += len(text)
            if len(found) == _ROWS or size > _BYTES:
                break
        return found

    def count(self, table: str) -> int:
        return int(self._query(f"SELECT count(*) AS n FROM {table} {_but_own(table)}", {})[0]["n"])  # noqa: S608


class Target(PostgresDatabase):
    """The schema that is filled. While `close_to_others` holds, nobody can open it."""

    def clear(self) -> None:
        names = ", ".join(f"{self.place.schema}.{table}" for table in (*TABLES, *LEFT))
        self._query(f"TRUNCATE {names}")

    def close_to_others(self) -> None:
        table = f"{self.place.schema}.migrations"
        self._query(f"INSERT INTO {table} (number, name) VALUES ({FILLING}, 'filling') ON CONFLICT DO NOTHING")  # noqa: S608

    def open_to_others(self) -> None:
        self._query(f"DELETE FROM {self.place.schema}.migrations WHERE number = {FILLING}")  # noqa: S608

    def load(self, table: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Write rows by COPY, in the transaction that is open."""
        try:
            with (
                self._connection().cursor() as cursor,
                cursor.copy(f"COPY {self.place.schema}.{table} ({', '.join(columns)}) FROM STDIN") as copy,
            ):
                for row in rows:
                    copy.write_row(row)
        except psycopg.Error as error:
            raise self._as_ours(error) from error

    def count(self, table: str) -> int:
        sql = f"SELECT count(*) FROM {self.place.schema}.{table} {_but_own(table)}"  # noqa: S608
        return int(self._query(sql)[0][0])

    def claimers(self) -> list[str]:
        """The nodes that jobs are claimed by."""
        rows = self._query(f"SELECT DISTINCT node FROM {self.place.schema}.jobs WHERE status = 'processing'")  # noqa: S608
        return [str(row[0]) for row in rows]

    def settle(self) -> None:
        """Count the depths from the rows, and let new ids begin after the old ones."""
        schema = self.place.schema
        self._query(f"DELETE FROM {schema}.depths")  # noqa: S608
        self._query(
            f"INSERT INTO {schema}.depths (queue, status, n) "  # noqa: S608
            "SELECT queue, CASE WHEN status = 'queued' AND later = 1 THEN 'scheduled' ELSE status END, count(*) "
            f"FROM {schema}.jobs WHERE status <> 'done' GROUP BY 1, 2"
        )
        for table in _NUMBERED:
            self._query(
                f"SELECT setval(pg_get_serial_sequence('{schema}.{table}', 'id'), greatest(1, max(id)), max(id) IS NOT NULL) "  # noqa: S608
                f"FROM {schema}.{table}"
            )


def _but_own(table: str) -> str:
    return f"WHERE key NOT IN ({', '.join(repr(key) for key in _OWN_META)})" if table == "meta" else ""


def _storable(value: Any) -> Any:
    return value.replace("\x00", "\ufffd") if isinstance(value, str) else value


class Copy:
    """One copy, or the rest of one. `report` is called after each chunk."""

    def __init__(self, source: Source, target: Target, report: Report = lambda *_: None) -> None:
        self._from, self._to, self._report = source, target, report
        self._stores = Store(source), Store(target)
        self._name = self._stores[0].meta.once("store_id", secrets.token_hex(8))  # it goes along: artifacts name it
        self._progress: dict[str, Any] = {}

    def run(self) -> Summary:
        """Copy what is not there yet; check; open the target. Raises Conflict or ConfigError, and can then be run again."""
        with self._from.transaction():  # nobody writes there meanwhile
            state = self._from.state()
            if self._finished():
                return self._summary(already=True)
            resumed = self._begin(state)
            if not self._progress["checked"]:
                for table in TABLES:
                    self._table(table)
                self._compare()
            summary = self._summary(resumed=resumed)
            return summary._replace(requeued=self._finish())

    # ---- the beginning

    def _finished(self) -> bool:
        found = self._stores[1].meta.get("copied")
        return found is not None and json.loads(found)["from"] == self._name and self._noted() is None

    def _noted(self) -> dict[str, Any] | None:
        found = self._stores[1].meta.get("copy")
        return None if found is None else dict(json.loads(found))

    def _begin(self, state: str) -> bool:
        """Make the target ready; True where an interrupted copy goes on."""
        with self._to.transaction():
            self._to.lock(["copy"])
            noted = self._noted()
            if noted is not None and noted["from"] != self._name:
                raise Conflict(
                    f"{self._where()} holds an unfinished copy of another store; finish that one, or drop the schema"
                )
            if noted is not None and noted["state"] == state:
                self._progress = noted
                return True
            if noted is None:
                self._check_free()
            self._to.close_to_others()
            self._to.clear()
            self._note({"from": self._name, "state": state, "after": {}, "checked": False})
        return False

    def _check_free(self) -> None:
        alive = [node["name"] for node in self._stores[1].nodes.alive()]
        if alive:
            raise Conflict(f"nodes run on {self._where()} ({', '.join(alive)}); stop them first")
        if jobs := self._to.count("jobs"):
            raise Conflict(
                f"{self._where()} has {jobs} jobs already, and a copy keeps the ids of its jobs; "
                "choose an empty database, or another schema with ?schema=…"
            )

    def _where(self) -> str:
        return f"schema {self._to.place.schema} of {self._to.place.shown}"

    def _note(self, progress: dict[str, Any]) -> None:
        self._to.run("meta_set", key="copy", value=json.dumps(progress))
        self._progress = progress

    # ---- the tables

    def _table(self, table: str) -> None:
        added = _ADDED.get(table, {})
        columns = self._from.columns(table)
        total = self._from.count(table)
        copied = self._to.count(table)
        for rows in self._chunks(table, columns):
            with self._to.transaction():
                self._alone()
                self._to.load(
                    table, [*columns, *added], [(*row, *added.values()) for row in _kept(table, columns, rows)]
                )
                key = [rows[-1][columns.index(name)] for name in TABLES[table]]
                self._note({**self._progress, "after": {**self._progress["after"], table: key}})
            copied += len(rows)
            self._report(table, copied, total)

    def _chunks(self, table: str, columns: Sequence[str]) -> Iterator[list[tuple[Any, ...]]]:
        while rows := self._from.rows(table, columns, self._progress["after"].get(table)):
            yield rows

    def _alone(self) -> None:
        """Raise Conflict when another one copies there at the same time."""
        self._to.lock(["copy"])
        if self._noted() != self._progress:
            raise Conflict(f"another 'ostler migrate' fills {self._where()} right now; let that one finish")

    # ---- the end

    def _compare(self) -> None:
        """Raise ConfigError unless both have the same number of rows in each table, and of jobs in each queue and status."""
        wrong = []
        for table in TABLES:
            here, there = self._from.count(table), self._to.count(table)
            if here != there:
                wrong.append(f"{table} has {there} rows instead of {here}")
        mine, theirs = (_counted(db) for db in (self._from, self._to))
        wrong += [
            f"{theirs.get(key, 0)} jobs of {'/'.join(key)} instead of {mine.get(key, 0)}"
            for key in sorted(mine.keys() | theirs.keys())
            if mine.get(key) != theirs.get(key)
        ]
        if wrong:
            raise ConfigError(
                f"the copy in {self._where()} is not whole: {'; '.join(wrong)}. Drop the schema and copy again"
            )
        with self._to.transaction():
            self._alone()
            self._note({**self._progress, "checked": True})

    def _summary(self, **more: bool) -> Summary:
        jobs: dict[str, dict[str, int]] = {}
        for (queue, status), n in _counted(self._to).items():
            jobs.setdefault(queue, {})[status] = n
        return Summary({table: self._to.count(table) for table in TABLES}, jobs, **more)

    def _finish(self) -> int:
        """Requeue what was running, without blame, and let others in; how many jobs were requeued."""
        back, to = 0, self._stores[1]
        for node in to.nodes.unreleased():
            back += len(to.nodes.release(node))
        for claimer in self._to.claimers():
            back += len(to.turns.recover(claimer, to.now(), "its store was copied to another database"))
        with self._to.transaction():
            self._alone()
            self._to.settle()
            to.db.run("meta_set", key="copied", value=json.dumps({"from": self._name, "at": int(time.time() * 1000)}))
            to.db.run("meta_delete", key="copy")
            self._to.open_to_others()
        return back


def _kept(table: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """The rows as they arrive. No node runs on the source, so none of those that it knows lives."""
    if table == "meta":
        return [row for row in rows if row[columns.index("key")] not in _OWN_META]
    if table == "nodes":
        return [_ended(dict(zip(columns, row, strict=True))) for row in rows]
    return list(rows)


def _ended(node: dict[str, Any]) -> tuple[Any, ...]:
    if node["status"] in LIVE:
        node |= {"status": "dead", "ended_at": node["beat_at"], "waits": "[]"}
    return tuple(node.values())


def _counted(db: Source | Target) -> dict[tuple[str, str], int]:
    return {(row["queue"], row["status"]): row["n"] for row in db.run("count_jobs")}
