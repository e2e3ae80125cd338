"""Starting a worker, and hearing it: what a process says is noted here, and the supervisor's loop takes the next step."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ostler.errors import OstlerError
from ostler.events import Printed, WorkerMoved
from ostler.lifecycle import launch, plain
from ostler.lifecycle.process import Ended, Process
from ostler.lifecycle.state import Status, move
from ostler.lifecycle.wire import Frame
from ostler.lifecycle.worker import Slot, Worker
from ostler.store import now_ms

if TYPE_CHECKING:
    from ostler.lifecycle.supervisor import Supervisor

log = logging.getLogger("ostler.lifecycle")

_OWN = frozenset({"beat", "ready", "tired"})  # frames that are the lifecycle's, and not the tenant's


class Starts:
    """The supervisor's part for new processes."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def spawn(self, slot: Slot, *, heir: bool = False) -> None:
        """Start the next generation in the slot."""
        spec = slot.pool.spec
        slot.generation += 1
        now, at = time.monotonic(), now_ms()
        worker = Worker(slot, slot.generation, started=now, started_ms=at, last_beat=now, last_beat_ms=at)
        if heir:
            slot.heir = worker
        else:
            before, status = slot.rest, move(slot.component, slot.rest, Status.STARTING)
            self._supervisor.bus.send(WorkerMoved(slot.component, worker.generation, before, status))
            slot.worker = worker
        ticket = slot.heir_ticket if heir else slot.ticket
        filled: dict[str, str] = {}
        argv: Sequence[str] = ()
        try:
            argv = spec.argv(slot) if callable(spec.argv) else spec.argv
            filled = launch.places(spec, slot, argv)
            beat = self._supervisor.settings.heartbeat_interval
            worker.process = Process(
                launch.prepare(
                    spec,
                    slot,
                    worker.generation,
                    argv,
                    filled,
                    self._supervisor.token,
                    self._supervisor.settings.data_dir,
                    beat,
                    ticket.device if ticket else None,
                ),
                on_frame=self._ear(worker),
                on_line=lambda line: self._line(worker, line),
                on_labelled=lambda label, lines: spec.tenant.output(worker, label, lines),
                on_printed=lambda: self._supervisor.bus.send(Printed(slot.component)),
                on_end=lambda ended: self._noticed_end(worker, ended),
                on_garbage=lambda what: self._garbage(worker, what),
                unhurried=lambda: worker.unhurried,
            )
        except (OSError, ValueError, OstlerError) as error:
            why = f"{argv[0]}: {error.strerror}" if argv and isinstance(error, OSError) and error.strerror else error
            log.error("%s cannot be started: %s", slot.component, why)  # noqa: TRY400
            self._supervisor.kill(worker, "spawn")
        if filled.get("port", "0") != "0":
            worker.metadata = {"port": int(filled["port"])}
        self._supervisor.reserving.started(slot, worker)
        if not heir:
            self._supervisor.records.starting(worker)
        if spec.probe is not None and worker.process is not None:
            worker.probe = spec.probe.fill(filled)
            watching = plain.watch(worker, self._supervisor.settings.heartbeat_interval, self._supervisor.wake)
            self._supervisor.spawn_task(watching, f"probe {slot.component}")

    # ---- what workers say (callbacks: note the fact, wake the loop)

    def _ear(self, worker: Worker) -> Callable[[Frame], None]:
        """What hears its frames: most are for its tenant, and short jobs make many."""
        heard = worker.pool.spec.tenant.heard

        def hear(frame: Frame) -> None:
            if frame[0] in _OWN:
                self._heard(worker, frame)
            else:
                heard(worker, frame)

        return hear

    def _heard(self, worker: Worker, frame: Frame) -> None:
        kind, tenant = frame[0], worker.pool.spec.tenant
        if kind == "beat":
            _, rss, peak, *facts = frame
            worker.last_beat, worker.last_beat_ms = time.monotonic(), now_ms()
            worker.rss_mb = float(rss)
            if worker.process:
                worker.process.peak_rss_mb = max(worker.process.peak_rss_mb, float(peak))
            wanted = tenant.beat(worker, facts[0] if facts else None)
            if wanted is not None:
                worker.send("wanted", wanted)
        elif kind == "ready":
            worker.announced = True
            worker.info = frame[1] if len(frame) > 1 and isinstance(frame[1], dict) else {}
            self._supervisor.wake()
        else:
            worker.tired = str(frame[1])[:200]
            self._supervisor.wake()

    def _line(self, worker: Worker, line: str) -> None:
        if (
            worker.probe
            and worker.probe.kind == "line"
            and not worker.announced
            and re.search(worker.probe.target, line)
        ):
            worker.announced = True
            self._supervisor.wake()

    def _garbage(self, worker: Worker, what: str) -> None:
        log.error("%s broke the protocol: %s", worker.component, what)
        self._supervisor.kill(worker, "protocol")

    def _noticed_end(self, worker: Worker, ended: Ended) -> None:
        worker.ended = ended
        try:
            worker.pool.spec.tenant.died(worker, ended)
        except Exception:
            log.exception("%s: its tenant failed on its death", worker.component)
        self._supervisor.wake()
