"""One store: the record of jobs, health and flags, whichever database is under it.

A `Store` is one connection for one thread at a time. Processes and threads each open their own.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Self

from ostler import private
from ostler.errors import ConfigError, StoreBusy
from ostler.store.health import Health, Meta
from ostler.store.jobs import JobRecords
from ostler.store.live import LiveRecords
from ostler.store.sqlite import SqliteDatabase


def now_ms() -> int:
    """The wall clock in milliseconds UTC: for what is stored. Durations use the monotonic clock."""
    return time.time_ns() // 1_000_000


class Store:
    """The verbs by noun: `jobs`, `health`, `meta`, `live`."""

    def __init__(self, db: SqliteDatabase) -> None:
        self.db = db
        self.jobs = JobRecords(db)
        self.health = Health(db)
        self.meta = Meta(db)
        self.live = LiveRecords(db)

    @classmethod
    def open(
        cls,
        url: str,
        data: Path,
        *,
        durable: bool = True,
        busy_timeout: float = 5.0,
        read_only: bool = False,
        cache_mb: int = 4,
    ) -> Store:
        """Connect and bring the schema up to date. `url` '' or 'sqlite' is the database in the data directory."""
        path = database_path(url, data)
        private.check(path, write=not read_only)
        if read_only and not path.exists():
            raise ConfigError(
                f"there is no store at {path}; start a node there with 'ostler up', or name another with --data"
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
            db = SqliteDatabase(
                path, durable=durable, busy_timeout=busy_timeout, read_only=read_only, cache_mb=cache_mb
            )
        except StoreBusy as error:
            if "unable to open" not in str(error) and "readonly" not in str(error):
                raise  # locked or full: that passes
            raise ConfigError(
                f"the store {path} cannot be opened ({error.__cause__}); check its owner and permissions"
            ) from error
        if read_only:
            db.require()
        else:
            db.migrate()
        return cls(db)

    def close(self) -> None:
        self.db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def database_path(url: str, data: Path) -> Path:
    """The SQLite file that a store URL names."""
    if url in ("", "sqlite"):
        return data / "ostler.db"
    if url.startswith("sqlite:///"):
        return Path(url.removeprefix("sqlite:///"))
    scheme = url.partition(":")[0]
    raise ConfigError(
        f"store {scheme}://… is not supported by this version; leave it out for SQLite in the data directory, or use sqlite:///path"
    )
