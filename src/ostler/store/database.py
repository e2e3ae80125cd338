"""The database under the store: one small protocol, and two implementations (sqlite.py, postgres.py).

The verbs of the store are written once, against this. What they say to a database is in named statements: `sql/sqlite` and
`sql/postgres` hold files of the same names, with the same statements and the same parameters (queries.py checks that). What
the two must do differently is behind the methods below: locks, ids, the wake-up and the clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from ostler.errors import ConfigError

_POSTGRES = ("postgresql", "postgres")
_SCHEMA = re.compile(r"[a-z_][a-z0-9_]{0,62}")


class Database(Protocol):
    """One connection, for one thread at a time. Errors come as ours: StoreBusy where a later try may work."""

    dialect: str
    shared: bool
    """Whether several connections write at the same time. Without it there is one writer, who holds everything."""
    held: float
    """Seconds that transactions were open in all: for as long they may have kept others waiting."""

    def run(self, statement: str, /, **values: Any) -> list[Any]:
        """Execute one named statement and return its rows; a column is found by its name or its number."""

    def select(self, statement: str, conditions: Sequence[str], /, **values: Any) -> list[Any]:
        """`run` a statement whose `{where}` stands for these named conditions."""

    def run_many(self, statement: str, rows: Sequence[Sequence[Any]], /) -> None:
        """Execute one named statement, which returns nothing, for each row of positional values."""

    def tell(self, statement: str, /, **values: Any) -> None:
        """`run` a statement that returns nothing. Inside a transaction it may wait and travel with what follows."""

    def insert(self, statement: str, rows: Sequence[Sequence[Any]], /, *, rings: bool = False) -> list[int]:
        """`run_many` for a statement that makes ids; the new ids, in the order of the rows. Inside a transaction, or for one row as a
        transaction of its own, which also `rings`.
        """

    def alone(self, statement: str, /, **values: Any) -> list[Any]:
        """`run` one statement that is a transaction by itself, in one trip. Raises StoreDoubt when it may have been committed."""

    def transaction(self, locked: str = "", /) -> AbstractContextManager[None]:
        """All or nothing. What is committed survives the death of any process. `locked`: a name that is locked with it, as `lock` does."""

    def lock(self, names: Iterable[str], /) -> None:
        """Inside a transaction: wait until no other transaction holds these names, and hold them until the end of this one.

        Names are taken in one order, so that two who want the same ones do not lock each other out. Rows of batches are changed
        before, counters after.
        """

    def try_lock(self, name: str, /) -> bool:
        """`lock` without waiting; False when another transaction holds the name."""

    def ring(self, queues: Iterable[str], /, *, others: bool = False) -> None:
        """Inside a transaction: when it is committed, wake the nodes that wait for jobs of these queues. `others`: a node itself
        does this, and knows.
        """

    def ring_all(self) -> None:
        """Wake every node, now or with the commit of the open transaction: an operator wants something."""

    def tell_ended(self, jobs: Sequence[int], /) -> None:
        """Inside a transaction: when it is committed, wake the processes that wait for the end of one of these jobs (`bell.Ends`)."""

    def synced(self) -> AbstractContextManager[None]:
        """Commits in here survive a power cut, whatever the connection does otherwise."""

    def now(self) -> int:
        """The store's clock in milliseconds UTC: what decides about leases and due times. All nodes read the same one."""

    def changed(self) -> int:
        """A number that changes when another connection has committed something."""

    def schema(self) -> int:
        """The number of the newest migration in it; 0 when there is none."""

    def migrate(self) -> list[str]:
        """Bring the schema up to date under a lock; the names of what was applied.

        A schema one newer than this code knows is used as it is: migrations only add. One that is newer still is a ConfigError.
        """

    def require(self) -> None:
        """Raise ConfigError when the schema is older than this code reads. For connections that may not change it."""

    def check(self) -> None:
        """Raise StoreGone when what this connection has open is no longer the store."""

    def close(self) -> None: ...


def is_postgres(url: str) -> bool:
    """Whether the URL names a PostgreSQL database."""
    return url.partition("://")[0] in _POSTGRES and "://" in url


class Address(NamedTuple):
    """What the URL of a PostgreSQL store says."""

    url: str
    """For the driver."""
    shown: str
    """Without the password."""
    schema: str
    pooler: bool
    """It leads to PgBouncer in transaction mode, or the like."""
    database: str
    """'' where the URL names none."""


def address_of(url: str) -> Address:
    """Take the URL of a PostgreSQL store apart; raises ConfigError. Needs no driver."""
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    schema = given.pop("schema", "ostler")
    pooler = given.pop("pooler", "") not in ("", "0", "false")
    if not _SCHEMA.fullmatch(schema):
        raise ConfigError(
            f"the schema {schema!r} of the store's URL must be of small letters, digits and _, and begin with a letter"
        )
    shown = f"postgresql://{parts.hostname or given.get('host', '')}{parts.path or '/'}"
    database = given.get("dbname") or unquote(parts.path.lstrip("/"))
    return Address(urlunsplit(("postgresql", *parts[1:3], urlencode(given), "")), shown, schema, pooler, database)


def shown(url: str) -> str:
    """The store as it may be shown to anybody: without user, password and options."""
    if not is_postgres(url):
        return url or "sqlite"
    parts = urlsplit(url)
    given = dict(parse_qsl(parts.query))
    kept = urlencode([(name, given[name]) for name in ("host", "port", "schema") if name in given], safe="/")
    return f"postgresql://{parts.netloc.rpartition('@')[2]}{parts.path or '/'}{f'?{kept}' if kept else ''}"


def home(url: str, data: Path) -> Path:
    """The folder of a node's lock, address and doorbell: that of the SQLite file, else the data directory."""
    return data if is_postgres(url) else sqlite_path(url, data).parent


def sqlite_path(url: str, data: Path) -> Path:
    """The SQLite file that a store URL names."""
    if url in ("", "sqlite"):
        return data / "ostler.db"
    if url.startswith("sqlite:///"):
        return Path(url.removeprefix("sqlite:///"))
    raise ConfigError(
        f"store {url.partition(':')[0]}://… is not supported; leave it out for SQLite in the data directory, "
        "or use sqlite:///path or postgresql://user@host/database"
    )


def _check_url(url: str) -> None:
    """Raise ConfigError on what is no URL at all. The driver judges the rest."""
    try:
        parts = urlsplit(url)
        wrong = "" if parts.port or parts.netloc or parts.path or parts.query else "it names no database"
    except ValueError as error:
        wrong = str(error)
    if wrong:
        raise ConfigError(
            f"the URL of the store cannot be used: {wrong}. It has the form postgresql://user:password@host:port/database"
        )


def place(url: str, data: Path) -> str:
    """Where the store is, in words: "in /srv/app/.ostler", "on postgresql://host/name"."""
    return f"on {shown(url)}" if is_postgres(url) else f"in {home(url, data)}"


def exists(url: str, data: Path) -> bool:
    """Whether there is a store already; of a server only connecting tells."""
    try:
        return is_postgres(url) or sqlite_path(url, data).exists()
    except PermissionError:
        return True  # opening it says what is wrong


def connect(url: str, data: Path, **how: Any) -> Database:
    """Open the store's database. `how`: durable, busy_timeout, read_only, create, cache_mb, told_again, steady (see the implementations)."""
    if is_postgres(url):
        from ostler.store.postgres import PostgresDatabase  # noqa: PLC0415  its driver is an extra

        _check_url(url)
        how.pop("cache_mb", None)
        return PostgresDatabase(url, **how)
    from ostler.store.sqlite import SqliteDatabase  # noqa: PLC0415

    return SqliteDatabase.open(sqlite_path(url, data), **how)
