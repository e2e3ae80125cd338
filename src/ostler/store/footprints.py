"""What workers needed in earlier runs, so that the next one reserves what it will really use."""

from __future__ import annotations

from typing import Any, NamedTuple

from ostler.store.database import Database


class Kind(NamedTuple):
    """Whose footprint: the same task, model and environment need the same memory on the same kind of device."""

    task: str
    model: str = ""
    env: str = ""


class Footprints:
    """Peaks of memory by kind and device. All nodes of a store share them."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def all(self) -> list[dict[str, Any]]:
        """Every footprint: task, model, env, device, host_mb, gpu_mb, load_ms, runs, at."""
        return [dict(row) for row in self._db.run("footprints")]

    def put(self, kind: Kind, device: str, host_mb: float, gpu_mb: float, load_ms: int | None, now: int) -> None:
        """Record the peaks of a run. A larger peak replaces the one that is known, a smaller one lowers it by a quarter of the way."""
        values = {"host_mb": float(host_mb), "gpu_mb": float(gpu_mb), "load_ms": load_ms, "now": now}
        self._db.run("put_footprint", **kind._asdict(), device=device, **values)

    def prune(self, before: int) -> None:
        """Forget what was last measured before then."""
        self._db.run("prune_footprints", before=before)
