"""SQLite as a database of named statements: WAL, short BEGIN IMMEDIATE transactions, one connection per owner.

`durable=True` is for connections that acknowledge an enqueue: a commit then waits for the disk, so what was acknowledged survives a
power cut. SQLite itself does not sync the commits (NORMAL); `_sync` does, after the ring: the node may begin with a job while its
producer still waits for the disk. The dispatcher's own connection does not wait: its commits survive any death of a process, and
after a power cut the job simply runs again.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from ostler import private
from ostler.errors import BadArguments, ConfigError, StoreBusy, StoreDoubt, StoreGone
from ostler.store import doorbell, queries

log = logging.getLogger("ostler.store")
T = TypeVar("T")

_POLL = 0.004  # seconds that SQLite itself waits for a lock: it looks every one or two milliseconds

_CHECKPOINT = 4000  # pages of 4 KiB in the WAL before they are moved into the file: each move waits for the disk twice

_WAL_AGAIN = 0.1  # seconds between two looks whether the WAL is still the same file

_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_DENIED = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM}
# What passes by itself, or when somebody makes room: worth a retry, never worth losing a job.
_PASSING = _LOCKED | _DENIED | {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PROTOCOL}
_BROKEN = {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}


class SqliteDatabase:
    """One connection. Not for use by two threads at once; open one per thread."""

    dialect = "sqlite"
    shared = False

    def __init__(
        self,
        path: Path,
        *,
        durable: bool = True,
        busy_timeout: float = 5.0,
        read_only: bool = False,
        cache_mb: int = 4,
    ) -> None:
        self.path, self._name, self._folder = path, str(path), path.parent
        self._sql = queries.load(self.dialect)
        self._busy_timeout, self._read_only = busy_timeout, read_only
        self.held = 0.0
        self._rings = False  # wake the node once the open transaction is committed
        self._durable = durable and not read_only
        self._wal: int | None = None
        self._log: tuple[int, int] | None = None  # which file the WAL is
        self._log_again = 0.0  # when to look at that again
        try:
            self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_POLL)
            self._connection.row_factory = sqlite3.Row
            self._insist(lambda: self._pragmas(read_only=read_only, cache_mb=cache_mb))
            self._file = _identity(self._name)
        except sqlite3.DatabaseError as error:
            raise _as_ours(error, path) from error

    @classmethod
    def open(
        cls, path: Path, *, durable: bool = True, read_only: bool = False, create: bool = True, **how: Any
    ) -> Self:
        """Connect to the file; where there is none it is made, private, or that is an error."""
        private.check(path, write=not read_only)
        if not path.exists() and (read_only or not create):
            raise ConfigError(
                f"there is no store at {path}; start a node there with 'ostler up', or name the data directory of a node elsewhere with --data"
            )
        try:
            if not path.parent.exists():
                private.prepare(path.parent)
            if not path.exists():
                private.create(path)  # SQLite gives its other files the mode of this one
        except OSError as error:
            raise ConfigError(
                f"the data directory {path.parent} cannot be made: {error.strerror}; name another with --data"
            ) from error
        if durable and not read_only:
            private.anchor(path.parent)
        try:
            return cls(path, durable=durable, read_only=read_only, **how)
        except StoreBusy as error:
            if _code(error.__cause__) not in _DENIED:
                raise  # locked or full: that passes
            raise ConfigError(
                f"the store {path} cannot be opened ({error.__cause__}); check its owner and permissions"
            ) from error

    def _pragmas(self, *, read_only: bool, cache_mb: int) -> None:
        execute = self._connection.execute
        if not read_only:
            execute("PRAGMA journal_mode = WAL")
        execute("PRAGMA synchronous = NORMAL")
        execute(f"PRAGMA cache_size = -{cache_mb}000")  # per connection, and a node has several
        execute("PRAGMA temp_store = MEMORY")
        execute("PRAGMA journal_size_limit = 67108864")
        execute(
            "PRAGMA ignore_check_constraints = 1"
        )  # the states are this code's own; a list of them is built anew for each row
        execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT}")
        if read_only:
            execute("PRAGMA query_only = 1")

    def run(self, statement: str, /, **values: Any) -> list[Any]:
        return self._query(self._sql[statement], values)

    def select(self, statement: str, conditions: Sequence[str], /, **values: Any) -> list[Any]:
        return self._query(queries.where(statement, conditions, self._sql), values)

    def tell(self, statement: str, /, **values: Any) -> None:
        self.run(statement, **values)

    def alone(self, statement: str, /, **values: Any) -> list[Any]:
        return self.run(statement, **values)

    def run_many(self, statement: str, rows: Sequence[Sequence[Any]], /) -> None:
        try:
            if len(rows) == 1:
                self._connection.execute(self._sql[statement], rows[0])
            else:
                self._connection.executemany(self._sql[statement], rows)
        except sqlite3.DatabaseError as error:
            raise _as_ours(error, self.path) from error

    def insert(self, statement: str, rows: Sequence[Sequence[Any]], /, *, rings: bool = False) -> list[int]:
        """Nobody else writes meanwhile and ids are never used twice, so they follow one another."""
        try:
            if len(rows) == 1:
                last = self._insist(self._connection.execute, self._sql[statement], rows[0]).lastrowid
                if not self._connection.in_transaction:
                    self._committed(rings=rings)
            else:
                self._connection.executemany(self._sql[statement], rows)
                last = self._connection.execute("SELECT last_insert_rowid()").fetchone()[0]
        except (OverflowError, UnicodeEncodeError) as error:
            raise BadArguments(f"a value cannot be stored: {error}") from error
        except sqlite3.DatabaseError as error:
            raise _as_ours(error, self.path) from error
        assert last is not None
        return list(range(last - len(rows) + 1, last + 1))

    def _query(self, sql: str, values: dict[str, Any]) -> list[Any]:
        changes = self._connection.total_changes
        try:
            found = self._insist(lambda: self._connection.execute(sql, values).fetchall())
            if self._connection.total_changes != changes and not self._connection.in_transaction:
                self._committed(rings=False)  # a transaction of its own
            return found
        except (OverflowError, UnicodeEncodeError) as error:
            raise BadArguments(f"a value cannot be stored or looked for: {error}") from error
        except sqlite3.DatabaseError as error:
            raise _as_ours(error, self.path) from error

    def transaction(self, locked: str = "", /) -> _Transaction:
        """All or nothing. Takes the write lock at once, so that nothing inside can find itself outdated."""
        return _Transaction(self)

    def lock(self, names: Iterable[str], /) -> None:
        """The one writer holds everything."""

    def try_lock(self, name: str, /) -> bool:
        return True

    def ring(self, queues: Iterable[str], /, *, others: bool = False) -> None:
        self._rings = self._rings or not others  # there is one node

    def ring_all(self) -> None:
        if self._connection.in_transaction:
            self._rings = True
        else:
            doorbell.ring(self._folder)

    def tell_ended(self, jobs: Sequence[int], /) -> None:
        """Whoever waits asks the node, or looks again."""

    def now(self) -> int:
        """The machine's clock: everybody who uses the file is on it."""
        return time.time_ns() // 1_000_000

    def begin(self) -> None:
        self._execute("BEGIN IMMEDIATE")

    def end(self, *, commit: bool) -> None:
        """Commit, or roll back what is still open."""
        try:
            if commit:
                self._execute("COMMIT")
        finally:
            rings, self._rings = self._rings, False
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            elif commit:
                self._committed(rings=rings)

    def _committed(self, *, rings: bool) -> None:
        if rings:
            doorbell.ring(self._folder)
        if self._durable:
            self._sync()

    def _sync(self) -> None:
        """Wait until everything that was committed is on the disk: by this connection and by all others.

        What is no longer in the WAL was synced by the checkpoint that moved it.
        """
        try:
            if self._wal is None:
                self._wal = os.open(f"{self._name}-wal", os.O_RDONLY | os.O_CLOEXEC)
            os.fdatasync(self._wal)
        except OSError as error:
            raise StoreDoubt(
                f"{self.path} was written, but the disk did not confirm it ({error.strerror}): it may be lost in a power cut. "
                "Look before you try again"
            ) from error

    @contextmanager
    def synced(self) -> Iterator[None]:
        before, self._durable = self._durable, True
        try:
            yield
        finally:
            self._durable = before

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
        newest = queries.newest(self.dialect)
        version = self.schema()
        if version > newest + 1:
            raise ConfigError(
                f"{self.path} has schema {version}, this ostler knows up to {newest}: it was used by a newer ostler. Upgrade this one."
            )
        if version > newest:
            log.warning("%s has schema %d, this ostler knows %d: upgrade this one soon", self.path, version, newest)
        if version >= newest:
            return []  # no lock where there is nothing to do
        with self.transaction():
            version = self.schema()
            todo = [m for m in queries.migrations(self.dialect) if m[0] > version]
            for number, _, script in todo:
                for statement in _split(script):
                    self._connection.execute(statement)
                self._connection.execute(f"PRAGMA user_version = {number}")
        return [name for _, name, _ in todo]

    def require(self) -> None:
        newest = queries.newest(self.dialect)
        if (found := self.schema()) < newest:
            raise ConfigError(
                f"{self.path} has schema {found}, this ostler reads {newest}; start a node there once with 'ostler up' to bring it up to date"
            )

    def schema(self) -> int:
        return int(self._connection.execute("PRAGMA user_version").fetchone()[0])

    def integrity(self) -> list[str]:
        """What SQLite's quick check finds; ["ok"] when nothing is wrong. Reads the whole file."""
        return [row[0] for row in self._connection.execute("PRAGMA quick_check")]

    def changed(self) -> int:
        return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def check(self) -> None:
        """SQLite does not notice that its file was deleted: it goes on in one that nobody will ever open again. Reading may go on
        there.
        """
        if self._read_only:
            return
        found = _identity(self._name)
        if found != self._file:
            what = "deleted" if found is None else "replaced by another file"
            raise StoreGone(
                f"the database {self.path} was {what} while it was in use; nothing was stored. Stop the node, put the file back, start it again"
            )
        if self._is_wal_gone():
            raise StoreGone(
                f"{self.path}-wal, which is a part of the database, was deleted or replaced while it was in use; nothing was stored. Stop the "
                "node, which saves what it held, and start it again"
            )

    def _is_wal_gone(self) -> bool:
        """Whether the WAL is not the file that it was. Seldom looked at: after each `stat`, Linux writes an exact time with the next change
        of the file, and a sync takes a fifth longer. What was committed meanwhile is not lost: it is saved when the connection is closed.
        """
        now = time.monotonic()
        if now < self._log_again:
            return False
        found = _identity(f"{self._name}-wal")
        self._log = self._log or found
        if found == self._log:
            self._log_again = now + _WAL_AGAIN
        return found != self._log

    def close(self) -> None:
        self._connection.close()
        wal, self._wal = self._wal, None
        if wal is not None:
            os.close(wal)


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


def _code(error: BaseException | None) -> int:
    """SQLite's primary result code of an error, 0 where it has none."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _locked(error: sqlite3.OperationalError) -> bool:
    return _code(error) in _LOCKED


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
    code = _code(error)
    if code in _DENIED and (refusal := private.refusal(path, write=True)) is not None:
        return refusal
    if code in _PASSING:
        return StoreBusy(f"the store {path} cannot be used right now ({error}); nothing was stored, try again")
    if code in _BROKEN:
        return ConfigError(f"{path} is not a usable SQLite database ({error}); move it away or restore a backup")
    return error
