"""The steps of a stop: request, grace, SIGTERM, a moment, SIGKILL to the group. Each takes one step for one worker."""

from __future__ import annotations

import logging
import signal
import time

from ostler.lifecycle.process import Ended
from ostler.lifecycle.worker import Worker

log = logging.getLogger("ostler.lifecycle")


def ask(worker: Worker, by: float | None = None) -> None:
    """Finish what you have and exit; with `by` (monotonic), signals follow then."""
    worker.leave = True
    if by is not None:
        worker.leave_by = by if worker.leave_by is None else min(by, worker.leave_by)


def request(worker: Worker, now: float) -> None:
    """It has nothing left to finish, or its grace is over: have it exit."""
    spec = worker.pool.spec
    if worker.leave_by is None:
        worker.leave_by = now + spec.stop_grace
    if now >= worker.leave_by:
        escalate(worker, now)
    elif spec.probe is None:
        worker.send("stop")
    elif worker.process:
        worker.process.signal(spec.drain_signal)


def escalate(worker: Worker, now: float) -> None:
    """It was asked to exit and has not: signals, each in its time."""
    if worker.signalled is None:
        if worker.leave_by is not None and now >= worker.leave_by and worker.process:
            log.warning("%s did not stop in time: sending SIGTERM", worker.component)
            worker.signalled = now
            worker.process.signal(signal.SIGTERM)
    elif now >= worker.signalled + worker.pool.spec.term_grace:
        log.warning("%s did not react to SIGTERM: sending SIGKILL", worker.component)
        kill(worker, "shutdown", on_purpose=True)


def kill(worker: Worker, reason: str, *, on_purpose: bool = False) -> None:
    """SIGKILL the whole group. The exit is then noticed like any other; `on_purpose`: it says nothing against the worker."""
    if worker.killing is not None or worker.ended is not None:
        return
    worker.killing, worker.on_purpose = reason, on_purpose
    if worker.process:
        worker.process.signal(signal.SIGKILL)
    else:  # it never became a process
        worker.ended = Ended(127, time.monotonic(), None)


def moments(worker: Worker, healthy_after: float) -> list[float]:
    """When the worker must be looked at again (monotonic), if nothing happens before."""
    spec, found = worker.pool.spec, []
    if worker.killing:
        return []
    if worker.announced:
        found.append(worker.last_beat + spec.stale_after)
        if spec.recycle.age:
            found.append(worker.ready_at + spec.recycle.age)
        if not worker.settled:
            found.append(worker.ready_at + healthy_after)
    else:
        found.append(worker.startup_ends)
    if worker.leave_by is not None:
        found.append(worker.leave_by if worker.signalled is None else worker.signalled + spec.term_grace)
    return found
