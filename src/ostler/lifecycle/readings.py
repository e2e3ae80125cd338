"""Readings of memory, taken in threads: one for the host and one for the GPUs, so that a slow driver delays the GPUs alone."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from ostler.lifecycle import family
from ostler.lifecycle.devices import Devices, Reading

T = TypeVar("T")


class HostReading(NamedTuple):
    """The host's memory, and what each session uses of it."""

    reading: Reading
    rss: dict[int, float]


class GpuReadings(NamedTuple):
    """The GPUs by UUID, and MB by device and session: None for a device whose driver does not tell. `at` (monotonic) is when the
    reading began: what was released later may not show in it.
    """

    readings: dict[str, Reading]
    sessions: dict[str, dict[int, float] | None]
    at: float


def read_host(devices: Devices, sessions: frozenset[int]) -> HostReading:
    """In a thread."""
    return HostReading(devices.host(), family.rss_by_session(set(sessions)) if sessions else {})


def read_gpus(devices: Devices) -> GpuReadings:
    """In a thread. Raises Unreadable."""
    at = time.monotonic()
    readings = devices.read()
    sessions = {r.device.uuid: None if r.per_pid is None else _by_session(r.per_pid) for r in readings}
    return GpuReadings({r.device.uuid: r for r in readings}, sessions, at)


def _by_session(per_pid: dict[int, float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for pid, mb in per_pid.items():
        try:
            session = os.getsid(pid)
        except OSError:  # it has ended, or it is not of our namespace
            continue
        found[session] = found.get(session, 0.0) + mb
    return found


class Reader(Generic[T]):
    """A thread that reads when it is asked to, and tells the loop. Asked while it reads, it reads once more."""

    def __init__(
        self, name: str, read: Callable[[], T], told: Callable[[T | Exception], None], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._read, self._told, self._loop = read, told, loop
        self._asked = threading.Event()
        self._stopping = False
        # A daemon: a driver that hangs must not keep the node from stopping.
        self._thread = threading.Thread(target=self._work, name=f"ostler-memory-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def ask(self) -> None:
        """Read now."""
        self._asked.set()

    def stop(self) -> None:
        """Nothing is told from now on."""
        self._stopping = True
        self._asked.set()

    def _work(self) -> None:
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._stopping:
                return
            found: T | Exception
            try:
                found = self._read()
            except Exception as error:  # noqa: BLE001  it is told
                found = error
            try:
                self._loop.call_soon_threadsafe(self._tell, found)
            except RuntimeError:  # the loop is closed
                return

    def _tell(self, found: T | Exception) -> None:
        if not self._stopping:
            self._told(found)
