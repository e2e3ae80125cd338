"""A `sqlite3` connection of somebody else as a database: the store's statements inside their transaction.

Nobody can be woken before they commit, so nobody is: the poll finds the jobs, or `app.wake()` tells the node.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from ostler.errors import BadArguments
from ostler.store import doorbell, queries
from ostler.store.sqlite import SqliteDatabase

_WRITE_LOCK = "DELETE FROM meta WHERE key IS NULL"  # changes nothing; from here on nobody else writes
_INSIDE = "ostler_enqueue"


class GuestDatabase(SqliteDatabase):
    """The connection's transaction is the caller's: what is stored here goes with its commit or rollback. Where none is open, one is
    begun as sqlite3 would; on a connection in autocommit mode it is committed here.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        """Raises BadArguments unless the connection has this file open as its main database."""
        _check_file(path, connection)
        self.path, self._name, self._folder = path, str(path), path.parent
        self._sql = queries.load(self.dialect)
        self._busy_timeout, self._read_only = 0.0, False  # the connection waits as long as its owner wants
        self.held, self._rings = 0.0, False
        self._durable, self._wal = False, None  # its commits are as durable as its owner made them
        self._guest = connection
        self._connection: Any = _Plain(connection)
        self._ours = self._nested = False

    def begin(self) -> None:
        self._nested = self._guest.in_transaction
        self._ours = not self._nested and _autocommits(self._guest)
        self._execute(f"SAVEPOINT {_INSIDE}" if self._nested else "BEGIN IMMEDIATE")
        self._execute(_WRITE_LOCK)

    def end(self, *, commit: bool) -> None:
        rings, self._rings = self._rings, False
        if not self._guest.in_transaction:
            return  # an error ended the caller's transaction
        if self._nested:
            if not commit:
                self._execute(f"ROLLBACK TO {_INSIDE}")
            self._execute(f"RELEASE {_INSIDE}")
        elif not commit:
            self._execute("ROLLBACK")
        elif self._ours:
            self._execute("COMMIT")
            if rings:
                doorbell.ring(self._folder)


class _Plain:
    """The connection without its owner's row factory."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @property
    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    @property
    def total_changes(self) -> int:
        return self._connection.total_changes

    def execute(self, sql: str, values: Any = ()) -> sqlite3.Cursor:
        return self._cursor().execute(sql, values)

    def executemany(self, sql: str, rows: Any) -> sqlite3.Cursor:
        return self._cursor().executemany(sql, rows)

    def _cursor(self) -> sqlite3.Cursor:
        cursor = self._connection.cursor(sqlite3.Cursor)
        cursor.row_factory = sqlite3.Row
        return cursor


def _autocommits(connection: sqlite3.Connection) -> bool:
    mode = getattr(connection, "autocommit", -1)  # from Python 3.12 on; -1: as isolation_level says
    return mode is True or (mode == -1 and connection.isolation_level is None)


def _check_file(path: Path, connection: sqlite3.Connection) -> None:
    found = next((row[2] for row in _Plain(connection).execute("PRAGMA database_list") if row[1] == "main"), "")
    if not found or not path.exists() or not Path(found).samefile(path):
        raise BadArguments(
            f"the connection is to {found or 'a temporary database'}, but the store is {path}; nothing was stored. "
            "Connect to that file, or leave out connection=…"
        )
