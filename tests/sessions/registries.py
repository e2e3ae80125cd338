"""Registries of sessions for tests: one on each database, and one on a Valkey server of the test's own."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ostler.config import Settings
from ostler.sessions.redis_registry import RedisRegistry
from ostler.sessions.registry import Admission, Beat, Ended, Registry, StoreRegistry, Verdict, WorkerEntry, WorkerKey
from ostler.store import Store
from ostler.store.lanes import Lane
from ostler.store.nodes import NodeRow
from tests.sessions.valkey import Server
from tests.servers import Server as Postgres
from tests.stores import new_database, rows

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
        rows = self.store.db.run("declare_dead", id="", home="nowhere", now=self.store.now(), since=0, judge=1)
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


async def given_up(turn: Awaitable[object], steps: int = 1) -> bool:
    """The turn is under way and whoever asked for it waits no longer: what became of it, nobody knows. False: it had an answer."""
    task = asyncio.ensure_future(turn)
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return task.cancelled()


YES = Verdict(ok=True)


def no(why: str) -> Verdict:
    return Verdict(ok=False, why=why)


# ---- Redis


class RedisBackend:
    """Nodes whose registry is a server of the test's own; the history is in a SQLite store."""

    name = "redis"

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.store = Store.open("", folder, durable=False)
        self._nodes: list[RedisRegistry] = []
        self._lane: Lane | None = None

    def settings(self, **more: Any) -> Settings:
        given = {"registry": self.server.url, "registry_attempts": 1, "registry_delay": 0.01}
        return Settings(**{**given, **more})

    async def node(self, name: str = "a", patience: float = 30.0, **settings: Any) -> RedisRegistry:
        if self._lane is None:
            self._lane = Lane("records", self._open, asyncio.get_running_loop())
            await self._lane.start()
        url = f"http://{name}:8356"
        registry = RedisRegistry(self.settings(**settings), self._lane, lambda: f"{name}@1", url, patience)
        await registry.start()
        registry._patient_until = 0.0  # it has waited for the others
        self._nodes.append(registry)
        return registry

    def _open(self) -> Store:
        return Store.open("", self.folder, durable=False)

    async def die(self, name: str, registry: Registry) -> None:
        """The node is gone for so long that its workers' keys have expired."""
        assert isinstance(registry, RedisRegistry)
        for own in registry._own.values():
            assert self.server.client.delete(f"worker:{own.field}")

    async def settled(self) -> None:
        if self._lane is not None:
            await self._lane.call(lambda store: None)

    async def history(self) -> dict[str, str | None]:
        await self.settled()
        return {row["id"]: row["reason"] for row in self.store.sessions.list(state="ended", limit=1000)[0]}

    async def close_nodes(self) -> None:
        for registry in self._nodes:
            await registry.stop()
        if self._lane is not None:
            await self._lane.stop()

    def close(self) -> None:
        self.store.close()


# ---- fixtures, for modules that import them

Backend = StoreBackend | RedisBackend


@pytest.fixture(scope="module")
def server():
    """One Valkey server for all tests here. Whoever stopped it need not start it again."""
    try:
        made = Server()
    except LookupError as missing:
        pytest.skip(str(missing))
    yield made
    made.close()


@pytest.fixture
def redis(server: Server, tmp_path: Path):
    """An empty registry on Valkey."""
    server.forget()
    made = RedisBackend(server, tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_database(postgres: Postgres):
    """One database for all tests of a module: to make one takes longer than most of them."""
    with new_database(postgres) as url:
        yield url


def _stored(request: pytest.FixtureRequest, folder: Path) -> StoreBackend:
    if request.param == "sqlite":
        return StoreBackend("", folder)
    made = StoreBackend(request.getfixturevalue("shared_database"), folder)
    for table in ("sessions", "session_workers", "nodes"):
        rows(made.store, f"DELETE FROM {table}")
    return made


@pytest.fixture(params=["sqlite", "postgres"])
def stored(request: pytest.FixtureRequest, tmp_path: Path):
    """An empty registry in the store, once on each database."""
    made = _stored(request, tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["sqlite", "postgres", "valkey"])
def backend(request: pytest.FixtureRequest, tmp_path: Path):
    """An empty registry, once of each kind."""
    if request.param == "valkey":
        yield request.getfixturevalue("redis")
        return
    made = _stored(request, tmp_path)
    yield made
    made.close()
