"""The node's own way in: requests that arrive together are stored in one durable transaction (group commit)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from ostler.errors import StoreBusy
from ostler.store.lanes import Lane
from ostler.store.rows import NewJob
from ostler.store.store import Store


class Intake:
    """Stores jobs that came over HTTP. One commit serves all requests that wait for it."""

    def __init__(self, lane: Lane, patience: float, stored: Callable[[], None]) -> None:
        self._lane, self._patience, self._stored = lane, patience, stored
        self._waiting: list[tuple[NewJob, asyncio.Future[tuple[int, bool]]]] = []
        self._flushing: asyncio.Task[None] | None = None

    async def enqueue(self, job: NewJob) -> tuple[int, bool]:
        """The id of the stored job, and whether it is new (a unique one may be there already); raises StoreBusy when the store stays locked or full, and then nothing was stored."""
        future: asyncio.Future[tuple[int, bool]] = asyncio.get_running_loop().create_future()
        self._waiting.append((job, future))
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().create_task(self._flush(), name="intake")
        return await future

    async def _flush(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting, []
                jobs = [job for job, _ in batch]
                try:
                    ids = await self._lane.call(partial(_store, jobs=jobs), patience=self._patience)
                except StoreBusy as error:
                    for _, future in batch:
                        _refuse(future, error)
                    continue
                except Exception:  # noqa: BLE001  one of them is bad: the others must not suffer for it
                    await self._one_by_one(batch)
                    continue
                self._stored()
                for (_, future), stored in zip(batch, ids, strict=True):
                    if not future.done():
                        future.set_result(stored)
        finally:
            self._flushing = None

    async def _one_by_one(self, batch: list[tuple[NewJob, asyncio.Future[tuple[int, bool]]]]) -> None:
        for job, future in batch:
            try:
                stored = await self._lane.call(partial(_store, jobs=[job]), patience=self._patience)
            except Exception as error:  # noqa: BLE001  it goes to the one who asked
                _refuse(future, error)
            else:
                if not future.done():
                    future.set_result(stored[0])
        self._stored()


def _refuse(future: asyncio.Future[tuple[int, bool]], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _store(store: Store, jobs: list[NewJob]) -> list[tuple[int, bool]]:
    return store.jobs.put(jobs, store.now())
