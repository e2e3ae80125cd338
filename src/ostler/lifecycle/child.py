"""The worker's end of the lifecycle: beats, frames, and leaving when the node dies. Standard library alone.

A side thread beats, and reads the control channel while the main thread works, so a long job neither stops the beat nor delays a
cancel. While the main thread has nothing to do it reads the channel itself: new work reaches it without a detour. EOF means
that the node died: whoever reads it ends the worker's whole family and then the worker itself, at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ostler.lifecycle import family
from ostler.lifecycle.wire import Frame, Frames, encode

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

CONTROL = "OSTLER_CONTROL"  # "<descriptor>:<beat interval>"
DESCRIPTOR = "OSTLER_FD_"  # + its name: a descriptor that the worker inherits

STACK: int | None = getattr(signal, "SIGRTMAX", None)
"""The signal on which a job's worker prints its Python stack; None where there is none to spare."""

# Exit codes of a worker that mean something (70 and up, so that they collide with no shell's and no signal's).
APP_LOAD = 70
MODEL_LOAD = 71
REASONS = {APP_LOAD: "app-load", MODEL_LOAD: "model-load"}


class Channel:
    """The control channel as the worker sees it. `send` may be called from any thread.

    `facts`, where it is given, is called for each heartbeat (on the side thread): what it returns travels with the beat, and
    the node's answer comes back as a frame `["wanted", …]`. `orphaned` is called once when the node has died, by whoever reads
    it; without it the worker leaves at once, and with it that is its business.
    """

    def __init__(
        self,
        heard: Callable[[Frame], None],
        facts: Callable[[], Any] | None = None,
        orphaned: Callable[[], None] | None = None,
    ) -> None:
        descriptor, _, interval = os.environ.pop(CONTROL).partition(":")
        # Children of the worker must not hold the channel: its EOF is how the node sees that the worker is gone.
        os.set_inheritable(int(descriptor), False)
        self._socket = socket.socket(fileno=int(descriptor))
        self._interval = float(interval)
        self._heard, self._facts, self._orphaned = heard, facts, orphaned
        self._loop: AbstractEventLoop | None = None
        self._pid = os.getpid()
        self._sending = threading.Lock()
        self._frames = Frames()
        self._reading = threading.Lock()  # held by the thread that waits at the socket
        self._lent = threading.Event()  # set: the side thread is to wait there
        self._lent.set()
        self._woken, self._waker = os.pipe()  # calls the side thread away from there
        self._thread = threading.Thread(target=self._guarded, args=(self._attend,), name="ostler-control", daemon=True)

    def open(self, loop: AbstractEventLoop | None = None) -> None:
        """Begin to beat and to listen; with a loop, frames are read by it, without a detour over the side thread."""
        if loop is not None:
            self._loop = loop
            self._lent.clear()
            loop.add_reader(self._socket.fileno(), self._guarded, self._receive)
        self._thread.start()

    def send(self, *frame: object) -> None:
        """Hand a frame to the node. When the node is gone, the listening thread is about to end this process.

        Raises RuntimeError in a forked child: its frames would be mixed up with the worker's own.
        """
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this is a forked child of the worker (pid {os.getpid()}), which cannot report to the node: "
                "let the job itself call job.event, job.progress and job.publish"
            )
        data = encode(list(frame))
        with self._sending:
            try:  # noqa: SIM105  once for each job: `suppress` would be an object each time
                self._socket.sendall(data)
            except (BrokenPipeError, ConnectionResetError):
                pass

    def listen(self, until: Callable[[], object]) -> None:
        """Hear frames on the calling thread until that is true: for the main thread, while it has nothing to do."""
        try:
            self._lent.clear()
            os.write(self._waker, b"!")
            with self._reading:
                while not until():
                    self._receive()
        finally:
            self._lent.set()

    def _guarded(self, work: Callable[[], None]) -> None:
        """A worker without its channel is of no use to anybody: it leaves at once, with the reason in its log."""
        try:
            work()
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            leave()

    def _attend(self) -> None:
        next_beat = 0.0
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            now = time.monotonic()
            if now >= next_beat:
                self.send("beat", *memory_mb(), *([self._facts()] if self._facts else []))
                next_beat = now + self._interval
            if not self._lent.wait(max(0.0, next_beat - time.monotonic())):
                continue
            # The main thread may have begun to listen just now, and may do so for hours: the next beat must not wait for it.
            if not self._reading.acquire(timeout=max(0.0, next_beat - time.monotonic())):
                continue
            try:
                ready = {number for number, _ in poll.poll(max(0.0, next_beat - time.monotonic()) * 1000)}
                if self._woken in ready:
                    os.read(self._woken, 64)
                if self._socket.fileno() in ready:
                    self._receive()
            finally:
                self._reading.release()

    def _end(self) -> None:
        """The node is gone."""
        orphaned, self._orphaned = self._orphaned, None
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        if orphaned is None:
            leave()
        else:
            orphaned()

    def _receive(self) -> None:
        """Wait for what comes next, and handle it."""
        try:
            data = self._socket.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self._end()
            return
        for frame in self._frames.feed(data):
            self._heard(frame)
        if self._frames.broken:
            raise ValueError(self._frames.broken)


def inherited(name: str) -> int:
    """A descriptor that the node passed to this worker; its own children do not get it."""
    descriptor = int(os.environ.pop(DESCRIPTOR + name))
    os.set_inheritable(descriptor, False)
    return descriptor


def memory_mb() -> tuple[float, float]:
    """(resident, peak) memory of this process in MB; (0, 0) where the system does not tell."""
    resident = peak = 0.0
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123
        for line in file:
            if line.startswith("VmHWM:"):
                peak = int(line.split()[1]) * 1024 / 1e6
            elif line.startswith("VmRSS:"):
                resident = int(line.split()[1]) * 1024 / 1e6
                break
    return round(resident, 1), round(peak, 1)


def leave() -> None:
    """The node is gone: end the family, then this process and its group. Never returns."""
    mark = os.environ.get(family.VARIABLE)
    with contextlib.suppress(Exception):
        if mark:
            family.kill(mark, [os.getpid()], patience=0.5)
    with contextlib.suppress(OSError):
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
    os._exit(1)
