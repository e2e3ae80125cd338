"""SQLite as a database of named statements: WAL, short BEGIN IMMEDIATE transactions, one connection per owner.

`durable=True` is for connections that acknowledge an enqueue: a commit then waits for the disk, so what was
acknowledged survives a power cut. The dispatcher's own connection uses NORMAL: its commits survive any death of a
process, and after a power cut the job simply runs again.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ostler import private
from ostler.errors import BadArguments, ConfigError, StoreBusy, StoreGone
from ostler.store import queries

log = logging.getLogger("ostler.store")
T = TypeVar("T")

_POLL = 0.004  # seconds that SQLite itself waits for a lock: it looks every one or two milliseconds

# What passes by itself, or when somebody makes room: worth a retry, never worth losing a job.
_PASSING = ("locked", "busy", "full", "disk i/o", "unable to open", "readonly")


class SqliteDatabase:
    """One connection. Not for use by two threads at once; open one per thread."""

    dialect = "sqlite"

    def __init__(
        self,
        path: Path,
        *,
        durable: bool = True,
        busy_timeout: float = 5.0,
        read_only: bool = False,
        cache_mb: int = 4,
    ) -> None:
        self.path, self._name = path, str(path)
        self._sql = queries.load(self.dialect)
        self._busy_timeout, self._read_only = busy_timeout, read_only
        self.held = 0.0  # seconds that the write lock was held in all
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_POLL)
            self._connection.row_factory = sqlite3.Row
            self._insist(lambda: self._pragmas(durable=durable, read_only=read_only, cache_mb=cache_mb))
            self._file = _identity(self._name)
        except sqlite3.DatabaseError as error:
            raise _as_ours(error, path) from error

    def _pragmas(self, *, durable: bool, read_only: bool, cache_mb: int) -> None:
        execute = self._connection.execute
        if not read_only:
            execute("PRAGMA journal_mode = WAL")
        execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        execute(f"PRAGMA cache_size = -{cache_mb}000")  # per connection, and a node has several
        execute("PRAGMA temp_store = MEMORY")
        execute("PRAGMA journal_size_limit = 67108864")
        if read_only:
            execute("PRAGMA query_only = 1")

    def run(self, statement: str, /, **values: Any) -> list[sqlite3.Row]:
        """Execute one named statement and return its rows."""
        return self.query(self._sql[statement], values)

    def run_many(self, statement: str, rows: list[tuple[Any, ...]], /) -> None:
        """Execute one named statement, which returns nothing, for each row of positional values."""
        try:
            if len(rows) == 1:
                self._connection.execute(self._sql[statement], rows[0])
            else:
                self._connection.executemany(self._sql[statement], rows)
        except sqlite3.DatabaseError as error:
            raise _as_ours(error, self.path) from error

    def insert(self, statement: str, rows: list[tuple[Any, ...]], /) -> list[int]:
        """Insert the rows with one named statement, inside a transaction; their new ids, in order.

        Nobody else writes meanwhile and ids are never used twice, so they follow one another.
        """
        try:
            if len(rows) == 1:
                last = self._connection.execute(self._sql[statement], rows[0]).lastrowid
            else:
                self._connection.executemany(self._sql[statement], rows)
                last = self._connection.execute("SELECT last_insert_rowid()").fetchone()[0]
        except (OverflowError, UnicodeEncodeError) as error:
            raise BadArguments(f"a value cannot be stored: {error}") from error
        except sqlite3.DatabaseError as error:
            raise _as_ours(error, self.path) from error
        assert last is not None
        return list(range(last - len(rows) + 1, last + 1))

    def query(self, sql: str, values: dict[str, Any]) -> list[sqlite3.Row]:
        """Execute SQL that was put together by the caller (filters) and return its rows."""
        try:
            return self._insist(lambda: self._connection.execute(sql, values).fetchall())
        except (OverflowError, UnicodeEncodeError) as error:
            raise BadArguments(f"a value cannot be stored or looked for: {error}") from error
        except sqlite3.DatabaseError as error:
            raise _as_ours(error, self.path) from error

    def transaction(self) -> _Transaction:
        """All or nothing. Takes the write lock at once, so that nothing inside can find itself outdated."""
        return _Transaction(self)

    def begin(self) -> None:
        self._execute("BEGIN IMMEDIATE")

    def end(self, *, commit: bool) -> None:
        """Commit, or roll back what is still open."""
        try:
            if commit:
                self._execute("COMMIT")
        finally:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")

    @contextmanager
    def synced(self) -> Iterator[None]:
        """Commits in here wait for the disk, whatever the connection does otherwise."""
        before = self._connection.execute("PRAGMA synchronous").fetchone()[0]
        self._execute("PRAGMA synchronous = FULL")
        try:
            yield
        finally:
            self._execute(f"PRAGMA synchronous = {before}")

    def _execute(self, sql: str) -> None:
        try:
            self._insist(self._connection.execute, sql)
        except sqlite3.DatabaseError as error:
            raise _as_ours(error, self.path) from error

    def _insist(self, action: Callable[..., T], *values: Any) -> T:
        """Try until the lock is free, for as long as the connection may wait.

        SQLite alone looks less and less often, at last ten times a second: a writer in a loop would then keep all others out.
        """
        try:
            return action(*values)
        except sqlite3.OperationalError as error:
            if not _locked(error):
                raise
        deadline = time.monotonic() + self._busy_timeout
        while True:
            try:
                return action(*values)
            except sqlite3.OperationalError as error:
                if not _locked(error) or self._connection.in_transaction or time.monotonic() >= deadline:
                    raise

    def migrate(self) -> list[str]:
        """Bring the schema up to date under the write lock; returns the names of what was applied.

        A schema one newer than this code knows is used as it is: migrations only add.
        """
        newest = max(number for number, _, _ in queries.migrations(self.dialect))
        version = self._version()
        if version > newest + 1:
            raise ConfigError(
                f"{self.path} has schema {version}, this ostler knows up to {newest}: it was used by a newer ostler. Upgrade this one."
            )
        if version > newest:
            log.warning("%s has schema %d, this ostler knows %d: upgrade this one soon", self.path, version, newest)
        if version >= newest:
            return []  # no lock where there is nothing to do
        with self.transaction():
            version = self._version()
            todo = [m for m in queries.migrations(self.dialect) if m[0] > version]
            for number, _, script in todo:
                for statement in _split(script):
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version = {number}")
        return [name for _, name, _ in todo]

    def require(self) -> None:
        """Raise ConfigError when the schema is older than this code reads. For connections that may not change it."""
        newest = max(number for number, _, _ in queries.migrations(self.dialect))
        if (found := self._version()) < newest:
            raise ConfigError(
                f"{self.path} has schema {found}, this ostler reads {newest}; start a node there once with 'ostler up' to bring it up to date"
            )

    def _version(self) -> int:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0])

    def version(self) -> int:
        """A number that changes when another connection has committed something."""
        return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def check_file(self) -> None:
        """Raise StoreGone when the file that this connection has open is no longer the one at its path.

        SQLite does not notice: it goes on in a file that nobody will ever open again. Reading may go on there.
        """
        found = _identity(self._name)
        if found != self._file and not self._read_only:
            what = "deleted" if found is None else "replaced by another file"
            raise StoreGone(
                f"the database {self.path} was {what} while it was in use; nothing was stored. Stop the node, put the file back, start it again"
            )

    def close(self) -> None:
        self._connection.close()


class _Transaction:
    """The body of a `with`. A class, because a generator costs more than the rest of a short transaction."""

    __slots__ = ("_began", "_db")

    def __init__(self, db: SqliteDatabase) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.begin()
        self._began = time.perf_counter()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._db.end(commit=kind is None)
        finally:
            self._db.held += time.perf_counter() - self._began


def _identity(path: str) -> tuple[int, int] | None:
    """Which file is there; None when there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116  quicker, and it is called often
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _locked(error: sqlite3.OperationalError) -> bool:
    return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _split(script: str) -> Iterator[str]:
    """Single statements of a script; `executescript` would commit our transaction."""
    buffer = ""
    for line in script.splitlines(keepends=True):
        buffer += line
        if sqlite3.complete_statement(buffer):
            yield buffer
            buffer = ""
    if buffer.strip() and not all(line.startswith("--") for line in buffer.strip().splitlines()):
        yield buffer


def _as_ours(error: sqlite3.DatabaseError, path: Path) -> Exception:
    text = str(error).lower()
    if ("readonly" in text or "unable to open" in text) and (refusal := private.refusal(path, write=True)) is not None:
        return refusal
    if any(word in text for word in _PASSING):
        return StoreBusy(f"the store {path} cannot be used right now ({error}); nothing was stored, try again")
    if "not a database" in text or "malformed" in text:
        return ConfigError(f"{path} is not a usable SQLite database ({error}); move it away or restore a backup")
    return error
