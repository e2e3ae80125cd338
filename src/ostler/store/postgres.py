"""PostgreSQL as a database of named statements: READ COMMITTED, short transactions, one connection per owner, by psycopg 3.

The statements name their tables `ostler.…`; another schema (`?schema=other` in the URL) takes that place when they are loaded, so
nothing depends on a `search_path`. Settings that a transaction needs are set inside it. Both are for PgBouncer in transaction
mode, where two transactions of one client may run on two sessions; say `?pooler=1` there, and nothing is prepared either.

A connection that is lost is made anew with the next use. What was under way raises StoreBusy: it was not stored. Only a commit
whose answer is lost leaves a doubt, and raises StoreDoubt.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ostler.errors import BadArguments, ConfigError, StoreBusy
from ostler.store import queries
from ostler.store.postgres_place import (
    Error,
    Outdated,
    Place,
    hung_up,
    works,
)  # before the next: it says that a driver is missing
from ostler.store.postgres_words import Said, Speaker, renamed, statements

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger("ostler.store")

OLDEST = 140000  # the oldest server whose SQL this is
_IDLE_MS = 5000  # after which the server ends a transaction whose client says nothing, or does not take what it sends
_CLOCK_FOR = 1.0  # seconds that the server's clock is followed by ours before it is asked again
_PROMPT = 0.25
FILLING = 9999  # in place of a migration's number: a copy of another store is under way (copy.py)

_CLOCK = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint"
_SNAPSHOT = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
_LOCK = """
SELECT pg_advisory_xact_lock(k) FROM (
  SELECT DISTINCT hashtextextended(name, 0) AS k FROM jsonb_array_elements_text(%(names)s::jsonb) AS name ORDER BY 1) AS keys
"""
# Read from the table: to_regclass may answer from a cache that does not know yet what another one has just committed.
_MIGRATED = """
SELECT 1 FROM pg_catalog.pg_class AS c JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
 WHERE n.nspname = %(schema)s AND c.relname = 'migrations'
"""
_MIGRATING = 3_600_000  # milliseconds that one who wants to migrate waits for another one who does
_TRY_LOCK = "SELECT pg_try_advisory_xact_lock(hashtextextended(%(name)s, 0))"
# Only where somebody waits for it: a node that is busy looks for more by itself. NOTIFY costs all commits a common lock.
_RING = """
SELECT pg_notify(%(channel)s, '') WHERE EXISTS (
  SELECT 1 FROM ostler.nodes AS n JOIN jsonb_array_elements_text(%(queues)s::jsonb) AS queue ON n.waits::jsonb ? queue)
"""

# NOTIFY only for jobs that somebody waits for.
_TELL_ENDED = """
SELECT pg_notify(%(channel)s, job::text) FROM ostler.waiters
 WHERE job = ANY (ARRAY(SELECT v::bigint FROM jsonb_array_elements_text(%(jobs)s::jsonb) AS v))
"""


class PostgresDatabase:
    """One connection. Not for use by two threads at once; open one per thread."""

    dialect = "postgres"
    shared = True

    def __init__(
        self,
        url: str,
        *,
        durable: bool = True,
        busy_timeout: float = 5.0,
        read_only: bool = False,
        create: bool = True,
        told_again: bool = False,
        steady: bool = False,
    ) -> None:
        """Every commit waits for the server's disk, unless its content is told again (a node that lives on must not remember claims that
        the server has lost; so `durable` alone is for SQLite, whose nodes fall with it).
        """
        self.place = Place(url)
        self._sql = statements(self.place.schema)
        self._read_only, self._told_again, self._synced = read_only, told_again, False
        self._steady = steady
        self.held = 0.0
        self._clock = (0.0, 0)  # (our monotonic clock, the server's in ms) when they were last compared
        self._lock_ms = int(busy_timeout * 1000)
        self._begin = "BEGIN"
        if self.place.pooler:  # each transaction may be in another session: it says everything itself
            local = "; ".join(f"SET LOCAL {name} = {value}" for name, value in self._session().items())
            self._begin = f"BEGIN ISOLATION LEVEL READ COMMITTED; {local}"
        self._open: psycopg.Connection[Any] | None = None
        self._speaker: Speaker
        self._inside = False
        self._begun = False  # something of the open transaction was said to the server
        self._waiting: list[Said] = []  # what the open transaction says with its next statement, its beginning too
        self._connection()

    # ---- statements

    def run(self, statement: str, /, **values: Any) -> list[Any]:
        return self._query(self._sql[statement], values)

    def select(self, statement: str, conditions: Sequence[str], /, **values: Any) -> list[Any]:
        return self._query(queries.where(statement, conditions, self._sql), values)

    def tell(self, statement: str, /, **values: Any) -> None:
        self._tell(self._sql[statement], values)

    def run_many(self, statement: str, rows: Sequence[Sequence[Any]], /) -> None:
        self._tell(self._sql[statement], {"rows": json.dumps([*rows])})

    def insert(self, statement: str, rows: Sequence[Sequence[Any]], /, *, rings: bool = False) -> list[int]:
        """The rows get their ids one after another, and a sequence only grows."""
        values = {"rows": json.dumps([*rows])}
        if not rings:
            return sorted(row[0] for row in self._query(self._sql[statement], values))
        return [self._alone(f"{statement}_alone", {**values, "channel": self.place.channel})[0][0]]

    def alone(self, statement: str, /, **values: Any) -> list[Any]:
        if not self.place.pooler:
            return self._alone(statement, values)
        with self.transaction():  # the session's settings are said there
            return self.run(statement, **values)

    def _alone(self, statement: str, values: Mapping[str, Any]) -> list[Any]:
        """A transaction in one trip. A connection that is lost during it leaves a doubt."""
        if self._open is not None and hung_up(self._open):
            self._open.close()  # the server went away while nobody used it
        connection = self._connection()
        try:
            return self._query(self._sql[statement], values)
        except StoreBusy as error:
            if works(connection):
                raise
            raise self.place.doubt(error.__cause__ or error) from error

    def _tell(self, sql: str, values: Mapping[str, Any]) -> None:
        if self._inside:
            self._waiting.append((sql, values))
        else:
            self._query(sql, values)

    def _query(self, sql: str, values: Mapping[str, Any] | None = None) -> list[Any]:
        """What waited, and then this; its rows."""
        waiting, self._waiting = self._waiting, []
        try:
            first, self._begun = self._inside and not self._begun, self._inside
            seemed_well = works(self._open)
            try:
                cursor = self._say(*waiting, (sql, values))
            except StoreBusy:
                if not (first and seemed_well) or works(self._open):
                    raise
                self._open = self._connect()  # it was lost while nobody used it, and nothing was said on it
                cursor = self._say(*waiting, (sql, values))
            return cursor.fetchall() if cursor.description else []
        except (OverflowError, UnicodeEncodeError) as error:
            raise BadArguments(f"a value cannot be stored or looked for: {error}") from error

    def _say(self, *said: Said) -> psycopg.Cursor[Any]:
        self._connection()
        try:
            try:
                return self._speaker.say(*said)
            except Outdated:  # a newer node has added a column: what was prepared is prepared again
                if self._inside:
                    raise
                self._speaker.roll_back()
                return self._speaker.say(*said)
        except Error as error:
            raise self._as_ours(error) from error

    def _as_ours(self, error: Error) -> Exception:
        return self.place.as_ours(error, works=works(self._open))

    def ask(self, sql: str, values: Mapping[str, Any] | None = None) -> list[Any]:
        """Any statement: for the doctor, who asks what no other database knows."""
        return self._query(sql, values)

    # ---- transactions

    @contextmanager
    def transaction(self, locked: str = "", /) -> Iterator[None]:
        self._start(locked)
        began, self._inside = time.perf_counter(), True
        try:
            yield
            self._commit()
        except BaseException:
            self._roll_back()
            raise
        finally:
            self._inside = self._begun = False
            self._waiting = []
            self.held += time.perf_counter() - began

    def _start(self, locked: str) -> None:
        """Its beginning travels with its first statement."""
        if self._open is not None and hung_up(self._open):
            self._open.close()  # the server went away while nobody used it
        self._connection()
        self._waiting = [(self._begin, None)]
        if self._synced and self._told_again:
            self._waiting.append(("SET LOCAL synchronous_commit = on", None))
        if locked:
            self._waiting.append((_LOCK, {"names": json.dumps([f"{self.place.schema}:{locked}"])}))

    def _commit(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not self._begun and all(values is None for _, values in waiting):
            return  # nothing but the beginning
        connection, self._begun = self._connection(), True
        try:
            self._speaker.say(*waiting, ("COMMIT", None))
        except Error as error:
            if not works(connection):
                raise self.place.doubt(error) from error
            raise self._as_ours(error) from error

    def _roll_back(self) -> None:
        self._waiting = []
        connection = self._open
        if not self._begun or connection is None or connection.closed:
            return
        try:
            self._speaker.roll_back()
        except Error:
            connection.close()  # the server rolls back what it has

    def lock(self, names: Iterable[str], /) -> None:
        if wanted := [f"{self.place.schema}:{name}" for name in names]:
            self._query(_LOCK, {"names": json.dumps(wanted)})

    def try_lock(self, name: str, /) -> bool:
        return bool(self._query(_TRY_LOCK, {"name": f"{self.place.schema}:{name}"})[0][0])

    def ring(self, queues: Iterable[str], /, *, others: bool = False) -> None:
        """As the last statement of a transaction it misses least: a node that falls asleep later looks by itself."""
        values = {"channel": self.place.channel, "queues": json.dumps([*queues])}
        self._tell(_RING.replace("ostler.", f"{self.place.schema}."), values)

    def ring_all(self) -> None:
        self._query("SELECT pg_notify(%(channel)s, '')", {"channel": self.place.channel})

    def tell_ended(self, jobs: Sequence[int], /) -> None:
        values = {"channel": self.place.ended_channel, "jobs": json.dumps([*jobs])}
        self._tell(_TELL_ENDED.replace("ostler.", f"{self.place.schema}."), values)

    @contextmanager
    def synced(self) -> Iterator[None]:
        """As far as the server's `synchronous_commit` goes."""
        before, self._synced = self._synced, True
        try:
            yield
        finally:
            self._synced = before

    # ---- the server

    def now(self) -> int:
        """The server's clock, followed by our monotonic one for a second."""
        ours, theirs = self._clock
        passed = time.monotonic() - ours
        if passed > _CLOCK_FOR or not theirs:
            passed, took, tries = 0.0, 1.0, 0
            while took > _PROMPT and tries < 5:  # an answer that was long under way tells an old time
                asked, tries = time.monotonic(), tries + 1
                theirs = int(self._query(_CLOCK)[0][0])
                took = time.monotonic() - asked
            self._clock = (time.monotonic(), theirs)
        return theirs + int(passed * 1000)

    def changed(self) -> int:
        """It also changes when something else in the server has: looking once too often is harmless."""
        return int(self._query(_SNAPSHOT)[0][0])

    def check(self) -> None:
        """A server that is gone says so by itself."""

    def close(self) -> None:
        if self._open is not None:
            self._open.close()

    def _connection(self) -> psycopg.Connection[Any]:
        if self._open is not None and works(self._open):
            return self._open
        if self._inside:
            raise StoreBusy(f"the connection to {self.place.shown} was lost; nothing was stored, try again")
        self._open = self._connect()
        return self._open

    def _connect(self) -> psycopg.Connection[Any]:
        if self._open is not None:
            self._open.close()
        try:
            made = self.place.connect(**self._options())
        except Error as error:
            raise self.place.refused(error, first=self._open is None) from error
        if (found := made.info.server_version) < OLDEST:
            made.close()
            raise ConfigError(
                f"{self.place.shown} is PostgreSQL {found // 10000}; ostler needs {OLDEST // 10000} or newer"
            )
        self._speaker = Speaker(made, plans=not self.place.pooler)
        return made

    def _options(self) -> dict[str, str]:
        if self.place.pooler:
            return {"application_name": "ostler"}
        reading = " -c default_transaction_read_only=on -c statement_timeout=30s" if self._read_only else ""
        always = f"-c timezone=UTC -c tcp_user_timeout={_IDLE_MS} -c default_transaction_isolation=read\\ committed"
        session = "".join(f" -c {name}={value}" for name, value in self._session().items())
        return {"application_name": "ostler", "options": always + session + reading}

    def _session(self) -> dict[str, Any]:
        """What holds for all that is said here."""
        # What is said here is short. Up to version 17 a way that is turned off (below) counts as so dear that the server compiles the plan first.
        settings: dict[str, Any] = {"lock_timeout": self._lock_ms, "jit": "off"}
        # A process that is stopped or cut off in the middle of a transaction must not keep its locks: others wait for them.
        settings["idle_in_transaction_session_timeout"] = _IDLE_MS
        if self._told_again:
            settings["synchronous_commit"] = "off"
        if self._steady:
            settings["plan_cache_mode"] = "force_generic_plan"
        if not self._read_only:
            # A plan that was made while a table was tiny is kept until the next analyze, and must not read a whole table then. Rows
            # are found by their ids, and taken in the order of an index, however many there are.
            ways = ("seqscan", "bitmapscan", "sort", "hashjoin", "mergejoin")
            settings |= {f"enable_{way}": "off" for way in ways}
        return settings

    # ---- the schema

    def schema(self) -> int:
        if not self._query(_MIGRATED, {"schema": self.place.schema}):
            return 0
        found = self._query(f"SELECT max(number) FROM {self.place.schema}.migrations")  # noqa: S608  checked in Place
        return int(found[0][0] or 0)

    def migrate(self) -> list[str]:
        newest, version = queries.newest(self.dialect), self.schema()
        where = f"schema {self.place.schema} of {self.place.shown}"
        self._check_filled(version)
        if version > newest + 1:
            raise ConfigError(
                f"{where} has version {version}, this ostler knows up to {newest}: it was used by a newer ostler. Upgrade this one."
            )
        if version > newest:
            log.warning("%s has version %d, this ostler knows %d: upgrade this one soon", where, version, newest)
        if version >= newest:
            return []  # no lock where there is nothing to do
        try:
            return self._migrate()
        except Error as error:
            raise self._as_ours(error) from error

    def _migrate(self) -> list[str]:
        name = self.place.schema
        with self.transaction():
            self._query(f"SET LOCAL lock_timeout = {_MIGRATING}")
            self.lock(["migrations"])
            self._query(f"SET LOCAL lock_timeout = {self._lock_ms}")
            version = self.schema()
            todo = [m for m in queries.migrations(self.dialect) if m[0] > version]
            if not self._query("SELECT 1 FROM pg_namespace WHERE nspname = %(name)s", {"name": name}):
                self._query(f"CREATE SCHEMA {name}")
            for number, title, script in todo:
                self._query(renamed(script, name))
                done = f"INSERT INTO {name}.migrations (number, name) VALUES (%(number)s, %(title)s)"  # noqa: S608
                self._query(done, {"number": number, "title": title})
        return [title for _, title, _ in todo]

    def require(self) -> None:
        newest = queries.newest(self.dialect)
        self._check_filled(found := self.schema())
        if found < newest:
            what = f"has version {found}, this ostler reads {newest}" if found else "is not there yet"
            raise ConfigError(
                f"schema {self.place.schema} of {self.place.shown} {what}; run 'ostler migrate', or start a node with 'ostler up'"
            )

    def _check_filled(self, version: int) -> None:
        if version == FILLING:
            raise ConfigError(
                f"schema {self.place.schema} of {self.place.shown} holds a copy that is not finished; "
                "run 'ostler migrate --from … --to …' again, or drop the schema"
            )
