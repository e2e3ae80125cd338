"""The log of calls that have ended: written in batches, read newest first, and kept within bounds of age and number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ostler.store.database import Database

OUTCOMES = ("done", "error", "refused", "cancelled", "died", "deadline")


class CallRow(NamedTuple):
    """A call that has ended. `id` is a microsecond, and with `node` it names the row."""

    id: int
    node: str
    request: str
    task: str
    model: str
    worker: str | None
    asked_at: int
    waited_ms: float
    took_ms: float | None
    bytes_in: int
    bytes_out: int
    status: int
    outcome: str
    code: str | None
    streamed: int
    host_mb: float | None
    gpu_mb: float | None


class CallRecords:
    """The call log. All nodes of a store share it."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, rows: Sequence[CallRow]) -> None:
        """Write these, all or none. A second time changes nothing."""
        if rows:
            with self._db.transaction():
                self._db.run_many("add_calls", rows)

    def list(
        self, *, limit: int = 50, before: tuple[int, str] | None = None, **filters: str | None
    ) -> tuple[list[dict[str, Any]], tuple[int, str] | None]:
        """The newest first, and where the next page begins. `before` is that of the page before; filters are `task`, `model`,
        `outcome` and `request`.
        """
        given: dict[str, Any] = {name: value for name, value in filters.items() if value is not None}
        conditions = [f"call_{name}" for name in given]
        if before is not None:
            conditions.append("call_before")
            given |= {"id": before[0], "node": before[1]}
        rows = self._db.select("calls", conditions, **given, limit=limit + 1)
        page = [{**dict(row), "streamed": bool(row["streamed"])} for row in rows[:limit]]
        return page, (page[-1]["id"], page[-1]["node"]) if len(rows) > limit else None

    def purge(self, before: int | None, kept: int, most: int) -> bool:
        """Delete some of those that ended before this time (milliseconds; None: age does not matter), or beyond the newest `kept`
        (0: their number does not); whether there may be more.
        """
        until = -1 if before is None else before * 1000
        if kept and (beyond := self._db.run("calls_beyond", kept=kept)):
            until = max(until, beyond[0]["id"])
        return len(self._db.run("purge_calls", until=until, most=most)) == most
