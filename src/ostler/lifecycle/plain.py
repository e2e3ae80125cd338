"""Programs that know nothing of Ostler: they do not beat, so the node asks and looks for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ostler.lifecycle import family, probe
from ostler.lifecycle.worker import Worker
from ostler.store import now_ms


async def watch(worker: Worker, interval: float, wake: Callable[[], None]) -> None:
    """Ask a program whether it is ready, and from then on whether it still is: each good answer is a beat."""
    assert worker.probe is not None
    if worker.probe.kind == "line":
        return  # its output announces it
    if worker.probe.kind == "none":
        worker.announced = True
        wake()
        return
    while worker.ended is None:
        worker.unwell = await probe.ask(worker.probe)
        if worker.unwell is None:
            worker.last_beat, worker.last_beat_ms = time.monotonic(), now_ms()
            if not worker.announced:
                worker.announced = True
                wake()
        await asyncio.sleep(interval if worker.announced else 0.1)


async def look(workers: list[Worker]) -> None:
    """Memory of whole sessions; and a beat for those of whom nothing can be known but that they live."""
    sessions: dict[int, Worker] = {}
    for worker in workers:
        if worker.probe and not worker.probe.repeats:
            worker.last_beat, worker.last_beat_ms = time.monotonic(), now_ms()
        if worker.process:
            sessions[worker.process.pid] = worker
    for pid, mb in (await asyncio.to_thread(family.rss_by_session, set(sessions))).items():
        worker = sessions[pid]
        worker.rss_mb = round(mb, 1)
        if worker.process:
            worker.process.peak_rss_mb = max(worker.process.peak_rss_mb, worker.rss_mb)
