"""The routes that an app adds with `@app.web`, in a test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fastapi import FastAPI
from fastapi.testclient import TestClient

from ostler.store.rows import NewJob
from ostler.store.store import Store
from ostler.web import errors
from ostler.web.context import Context
from ostler.web.extend import NodeApi

if TYPE_CHECKING:
    from ostler.testing import Bench

T = TypeVar("T")


class _Parts:
    """What `NodeApi` uses of a node: the bench's store, read and written in threads."""

    def __init__(self, bench: Bench) -> None:
        self._producer = bench.app.producer
        self.settings = bench.app.settings()
        self.tasks = {name: task.row for name, task in bench.app.tasks.items()}
        self.glance = self.reader = self.writer = self.intake = self
        self.supervisor = SimpleNamespace(member=SimpleNamespace(home=None))
        self.dispatcher = SimpleNamespace(deadlines=SimpleNamespace(cancel=lambda _: None))
        self.models: Callable[[], dict[str, Any]] = lambda: {
            f"{name}:{model}": {"state": "ready"} for name, spec in bench.app.models.items() for model in spec.models
        }
        self.gpu_lock = lambda: None

    async def call(self, work: Callable[[Store], T], **_: Any) -> T:
        return await asyncio.to_thread(self._producer.read, work)

    async def enqueue(self, job: NewJob) -> tuple[int, bool]:
        stored = (await self._producer.enqueue_async([job]))[0]
        return stored, getattr(stored, "is_new", True)


def api(bench: Bench, caller: Any) -> NodeApi:
    """What a node would give to the app's functions."""
    made = NodeApi(cast("Context", _Parts(bench)))
    made._caller = caller  # noqa: SLF001
    return made


def client(bench: Bench, caller: Any) -> TestClient:
    """A client of the app's own routes, with the error responses of a node. Exceptions of other kinds are raised in the test."""
    web = FastAPI()
    errors.install(web)
    for factory in bench.app.routes:
        web.include_router(factory(api(bench, caller)))
    return TestClient(web)
