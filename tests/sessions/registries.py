"""Registries of sessions for tests: one on each database, and one on a Valkey server of the test's own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from ostler.sessions.registry import Admission, Beat, Ended, Registry, StoreRegistry, Verdict, WorkerEntry, WorkerKey
from ostler.store import Store
from ostler.store.lanes import Lane
from ostler.store.nodes import NodeRow

Test = Callable[..., Awaitable[None]]
WORKER = WorkerKey("worker:chromium:0", 1)


def on_a_loop(test: Test) -> Callable[..., None]:
    """Run an async test; what its backend has opened is closed in the end."""

    @functools.wraps(test)
    def run(**given: Any) -> None:
        async def main() -> None:
            try:
                await test(**given)
            finally:
                for value in given.values():
                    if hasattr(value, "close_nodes"):
                        await value.close_nodes()

        asyncio.run(main())

    return run


class StoreBackend:
    """Nodes whose registry is the store."""

    name = "store"

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self.folder = url, folder
        self.store = Store.open(url, folder, durable=False)
        self._lanes: list[Lane] = []

    async def node(self, name: str = "a", lease_ms: int = 3_600_000) -> Registry:
        node = f"{name}@1"
        self.store.nodes.register(NodeRow(node, name, lease_ms, home=name, url=f"http://{name}:8356"))
        self.store.nodes.mark(node, "healthy")
        lanes = [Lane(n, self._open, asyncio.get_running_loop(), patience=30.0) for n in ("sessions", "glance")]
        for lane in lanes:
            await lane.start()
        self._lanes += lanes
        registry = StoreRegistry(*lanes, lambda: node, patience=30.0)
        await registry.start()
        return registry

    def _open(self) -> Store:
        return Store.open(self.url, self.folder, durable=False)

    async def die(self, name: str, registry: Registry) -> None:
        """The node is gone and another has declared it dead, and done no more."""
        self.store.db.run("node_mark", id=f"{name}@1", status="stopping", now=-3_600_000)
        rows = self.store.db.run("declare_dead", id="", home="nowhere", now=self.store.now(), judge=1)
        assert [row["id"] for row in rows] == [f"{name}@1"]

    async def settled(self) -> None:
        """What was put on lanes is written."""
        for lane in self._lanes:
            await lane.call(lambda store: None)

    async def history(self) -> dict[str, str | None]:
        await self.settled()
        return {row["id"]: row["reason"] for row in self.store.sessions.list(state="ended", limit=1000)[0]}

    async def close_nodes(self) -> None:
        for lane in self._lanes:
            await lane.stop()
        self._lanes = []

    def close(self) -> None:
        self.store.close()


# ---- values


def worker(component: str = WORKER.component, generation: int = WORKER.generation, **more: Any) -> WorkerEntry:
    values = {"pool": "chromium", "serves": "chromium", "address": "chromium-0.sock", "slots": 5, "lifetime": 50}
    return WorkerEntry(component, generation, **{**values, **more})


def asks(id: str, worker: WorkerKey = WORKER, **more: Any) -> Admission:
    values = {"pool": "chromium", "serves": "chromium", "owner": "token:ci"}
    return Admission(id, *worker, **{**values, **more})


def over(id: str, reason: str = "client", **more: Any) -> Ended:
    return Ended(id, reason, **more)


def beat(*ids: str, worker: WorkerKey = WORKER, status: str = "available", served: int = 0) -> Beat:
    return Beat(*worker, status, served, {id: (0, 0) for id in ids})


async def in_use(registry: Registry) -> dict[WorkerKey, tuple[int, int]]:
    """(in use, served) of each worker, as the registry tells anybody."""
    return {one.worker: (one.in_use, one.served) for one in await registry.workers()}


YES = Verdict(ok=True)


def no(why: str) -> Verdict:
    return Verdict(ok=False, why=why)
