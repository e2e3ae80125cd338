"""Holding back the claims of a queue while other programs need the machine (seed 002, R4). Off unless a pool asks for it.

A queue is held when more than `high_watermark` of its jobs are ready and the load that is not ours is above
`load_threshold`: busy CPU of the machine less that of the node and its workers' families, per core. The load of our own
workers never holds a queue. A hold lasts `backpressure_pause` seconds, concerns that queue alone, and is followed by at
least one claim before the next.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ostler.events import Backpressure, Bus
from ostler.lifecycle import family

log = logging.getLogger("ostler.jobs")

SPAN = 5.0  # seconds over which the load is measured


def reason(ready: int, load: float | None, *, high_watermark: int, load_threshold: float) -> str | None:
    """Why to hold the queue, or None. Both must be above: a long queue on an idle machine is no reason, nor is a busy machine alone."""
    if not high_watermark or load is None or ready <= high_watermark or load <= load_threshold:
        return None
    return (
        f"more than {high_watermark} jobs are ready and other programs use {load:.2f} of each core, "
        f"above load_threshold ({load_threshold:g})"
    )


def busy_seconds() -> float:
    """CPU time that the whole machine has spent on anything, since boot."""
    with open("/proc/stat", encoding="ascii") as file:  # noqa: PTH123
        user, nice, system, _idle, _wait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    """CPU seconds of the machine and of our own, at a moment."""

    at: float
    busy: float
    own: float


def foreign_load(before: Sample, after: Sample, cores: int) -> float:
    """What others used between two samples, per core: 1.0 is all of it."""
    spent = (after.busy - before.busy) - (after.own - before.own)
    return max(0.0, spent / max(0.001, after.at - before.at) / cores)


class Pressure:
    """The holds of one node. `watermarks` are those of the pools that ask for it."""

    def __init__(
        self, watermarks: Mapping[str, int], threshold: float, pause: float, bus: Bus, over: Callable[[], None]
    ) -> None:
        self.watermarks = {queue: mark for queue, mark in watermarks.items() if mark}
        self.count = 0
        self._threshold, self._pause, self._bus, self._over = threshold, pause, bus, over
        self._holds: dict[str, tuple[float, str]] = {}  # queue -> until, why
        self._spent: set[str] = set()  # queues whose hold is over and that have not claimed since
        self._sample: Sample | None = None
        self._load: float | None = None

    def holds(self, queue: str, now: float) -> bool:
        """Whether claims of the queue are held now."""
        found = self._holds.get(queue)
        return found is not None and now < found[0]

    def reasons(self, now: float) -> dict[str, str]:
        """The queues that are held, and why."""
        return {queue: why for queue, (until, why) in self._holds.items() if now < until}

    def claimed(self, queue: str) -> None:
        """A claim for the queue went to the store: it may be held again."""
        self._spent.discard(queue)

    async def measure(self) -> None:
        """Take a sample of the load, when the last one is old enough. Reads all of /proc, so in a thread."""
        now = time.monotonic()
        if self._sample is not None and now - self._sample.at < SPAN:
            return
        try:
            sample = await asyncio.to_thread(lambda: Sample(time.monotonic(), busy_seconds(), family.cpu_seconds()))
        except (OSError, ValueError) as error:
            log.debug("the load cannot be read: %s", error)
            return
        if self._sample is not None:
            self._load = foreign_load(self._sample, sample, os.cpu_count() or 1)
        self._sample = sample

    def press(self, ready: Mapping[str, int], now: float) -> None:
        """Hold the queues that call for it, by how many of their jobs are ready."""
        for queue, watermark in self.watermarks.items():
            if self.holds(queue, now) or queue in self._spent:
                continue
            why = reason(ready.get(queue, 0), self._load, high_watermark=watermark, load_threshold=self._threshold)
            if why is None:
                continue
            self.count += 1
            self._holds[queue] = (now + self._pause, why)
            self._spent.add(queue)
            asyncio.get_running_loop().call_later(self._pause + 0.01, self._over)
            self._bus.send(Backpressure(queue, why))
