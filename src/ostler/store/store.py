"""One store: the record of jobs, health and flags, whichever database is under it.

A `Store` is one connection for one thread at a time. Processes and threads each open their own.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Self

from ostler.store.calls import CallRecords
from ostler.store.changes import Changes
from ostler.store.database import Database, connect, is_postgres
from ostler.store.footprints import Footprints
from ostler.store.health import Health, Meta
from ostler.store.jobs import JobRecords
from ostler.store.live import LiveRecords
from ostler.store.nodes import Nodes
from ostler.store.places import Places
from ostler.store.sessions import SessionRecords
from ostler.store.turns import Turns


def now_ms() -> int:
    """The wall clock in milliseconds UTC: for what is stored. Durations use the monotonic clock."""
    return time.time_ns() // 1_000_000


class Store:
    """The verbs by noun: `jobs`, `turns`, `health`, `meta`, `live`, `nodes`, `footprints`, `calls`, `places`, `sessions`."""

    def __init__(self, db: Database) -> None:
        self.db = db
        changes = Changes(db)
        self.jobs = JobRecords(db, changes)
        self.turns = Turns(db, changes, self.jobs.flows, self.jobs.artifacts)
        self.health = Health(db)
        self.meta = Meta(db)
        self.live = LiveRecords(db)
        self.sessions = SessionRecords(db)
        self.nodes = Nodes(db, self.turns.recover_inside, self.sessions.release_inside)
        self.footprints = Footprints(db)
        self.calls = CallRecords(db)
        self.places = Places(db)

    @classmethod
    def open(
        cls,
        url: str,
        data: Path,
        *,
        durable: bool = True,
        busy_timeout: float = 5.0,
        read_only: bool = False,
        create: bool = True,
        cache_mb: int = 4,
        told_again: bool = False,
        steady: bool = False,
    ) -> Store:
        """Connect and bring the schema up to date. `url` '' or 'sqlite' is the SQLite file in the data directory.

        `durable` connections sync what they commit to the disk; `busy_timeout` is how long a statement waits for others.
        Without `create` a store that is not there yet is a ConfigError. `told_again`: whatever a server that crashes has forgotten is
        said once more by whoever knows it, so no commit waits for the disk. `steady`: the few statements that come again and again are planned
        once, whatever their values are; a server plans them anew each time where it takes that for cheaper.
        """
        durable = durable and not told_again
        how = {"durable": durable, "busy_timeout": busy_timeout, "read_only": read_only, "create": create}
        if is_postgres(url):
            how |= {"told_again": told_again, "steady": steady}
        db = connect(url, data, cache_mb=cache_mb, **how)
        try:
            if read_only:
                db.require()
            else:
                db.migrate()
        except BaseException:
            db.close()
            raise
        return cls(db)

    def now(self) -> int:
        """The store's clock in milliseconds UTC."""
        return self.db.now()

    def close(self) -> None:
        self.db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
