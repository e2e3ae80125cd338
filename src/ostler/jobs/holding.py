"""A worker asks whether it still owns its job, before it does what cannot be undone. The store decides."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ostler.errors import StoreBusy, StoreGone
from ostler.lifecycle.worker import Worker
from ostler.store.lanes import Lane

log = logging.getLogger("ostler.jobs")

Running = Callable[[Worker, int, int], bool]  # whether a worker is at this job, with this fence


class Holding:
    """The answers that are under way. `home` is where what is published is, if that is in the node's data directory."""

    def __init__(self, intake: Lane, home: str) -> None:
        self._intake, self._home = intake, home
        self._answers: set[asyncio.Task[None]] = set()

    def ask(self, worker: Worker, job: int, fence: int, key: str | None, running: Running) -> None:
        """Look it up and send the worker the answer."""
        answer = asyncio.get_running_loop().create_task(self._answer(worker, job, fence, key, running))
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

    async def _answer(self, worker: Worker, job: int, fence: int, key: str | None, running: Running) -> None:
        try:
            holds = await self._held(worker, job, fence, key, running)
        except Exception as error:  # noqa: BLE001
            log.warning("job %d: its claim could not be looked up (%s); it may not publish", job, error)
            holds = False
        worker.send("held", job, fence, holds)

    async def _held(self, worker: Worker, job: int, fence: int, key: str | None, running: Running) -> bool:
        """It waits as long as the store is away: only the job's own deadline ends that."""
        while True:
            try:
                return await self._intake.call(lambda s: s.jobs.hold(job, fence, key, self._home), patience=30.0)
            except StoreGone:
                raise
            except StoreBusy:
                if not running(worker, job, fence):
                    raise
