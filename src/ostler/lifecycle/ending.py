"""What follows when a worker has exited: the reason, what it had in hand, whose fault it was, the record, the next start.

A crash, from SIGKILL to restart: process.py sees the pidfd -> the supervisor has the family ended (orphans.py) -> here
`ends.judge` names the reason, the tenant takes back what the worker had in hand, `restart.blame` says whether the crash counts
and `restart.after_crash` when the next generation starts, if at all.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from ostler.events import WorkerMoved
from ostler.lifecycle import ends, restart
from ostler.lifecycle.process import Ended, oom_kills
from ostler.lifecycle.recycling import Recycling
from ostler.lifecycle.restart import Again, GiveUp
from ostler.lifecycle.state import Status, move
from ostler.lifecycle.worker import Exit, Left, Slot, Worker
from ostler.store import now_ms
from ostler.store.rows import ExitRow

if TYPE_CHECKING:
    from ostler.lifecycle.supervisor import Supervisor

log = logging.getLogger("ostler.lifecycle")

_LINES = 30  # of its log in the exit record


class Endings:
    """The supervisor's part for exits. It alone moves a slot to stopped, crashed or failed."""

    def __init__(self, supervisor: Supervisor, recycling: Recycling, limits: restart.Limits) -> None:
        self._supervisor, self._recycling, self._limits = supervisor, recycling, limits
        self._oom_kills = oom_kills()

    def ended(self, slot: Slot, worker: Worker, ended: Ended, now: float) -> None:
        """The worker has exited and its family is gone."""
        kills, before = oom_kills(), self._oom_kills
        self._oom_kills = kills
        end = ends.judge(worker, ended, slot.history, now_ms(), self._limits, memory_ran_out=kills > before)
        self._supervisor.reserving.ended(worker, end.reason)
        left = self._left(slot, worker, end)
        beside = worker is slot.heir or worker in slot.leaving  # says nothing about the slot, also not later
        counted = not beside and (slot.pool.blames(left.item, first=left.first) if end.kind == "crash" else True)
        row = ExitRow(
            component=slot.component,
            generation=worker.generation,
            at=now_ms(),
            reason=end.reason,
            kind=end.kind,
            code=end.code,
            signal=end.signal,
            peak_rss_mb=ended.peak_rss_mb,
            item=left.item,
            log=list(worker.process.tail)[-_LINES:] if worker.process else [],
            counted=counted,
        )
        if beside:
            self._beside(slot, worker, row, now)
            return
        slot.worker, slot.last_exit = None, row
        if end.kind == "crash":
            self._crashed(slot, worker, row, ends.recorded_code(end))
        else:
            self._stopped(slot, worker, row, ends.recorded_code(end))
        if slot.heir is not None:
            self._inherit(slot, slot.heir)

    def _left(self, slot: Slot, worker: Worker, end: Exit) -> Left:
        try:
            return slot.pool.spec.tenant.gone(worker, end)
        except Exception:
            log.exception("%s: its tenant failed on its exit", slot.component)
            return Left()

    def _stopped(self, slot: Slot, worker: Worker, row: ExitRow, code: int | None) -> None:
        if row.kind == "clean":
            slot.history = restart.after_clean_exit(slot.history, row.at, self._limits)
        slot.rest = move(slot.component, worker.status, Status.STOPPED)
        how = ends.words(row.reason, row.code, row.signal, long=True)
        self._tell(slot, worker.generation, worker.status, reason=row.reason, how=how, item=row.item)
        self._supervisor.records.stopped(row, code)
        if slot.waiting:
            self._supervisor.records.waits(slot)
        if not slot.wanted:
            self._recycling.over(slot)

    def _crashed(self, slot: Slot, worker: Worker, row: ExitRow, code: int | None) -> None:
        verdict: restart.Verdict = restart.after_uncounted_crash(self._limits)
        if row.counted:
            slot.history, verdict = restart.after_crash(slot.history, row.at, self._limits)
        slot.rest = move(slot.component, worker.status, Status.CRASHED)
        self._recycling.over(slot)
        delay = verdict.delay if isinstance(verdict, Again) else None
        slot.due, slot.due_ms = time.monotonic() + (delay or 0.0), None if delay is None else row.at + int(delay * 1000)
        self._tell(
            slot,
            worker.generation,
            worker.status,
            reason=row.reason,
            delay=delay,
            how=ends.words(row.reason, row.code, row.signal, long=True),
            item=row.item,
            counted=row.counted,
            line=ends.last_words(row.log, row.reason),
        )
        self._supervisor.records.crashed(row, code)
        if isinstance(verdict, GiveUp):
            slot.rest = move(slot.component, slot.rest, Status.FAILED)
            self._tell(slot, worker.generation, Status.CRASHED, reason=verdict.why)
            self._supervisor.records.failed(slot)
        if not slot.wanted and slot.rest is Status.CRASHED:
            self._supervisor.give_up_waiting(slot)

    def _inherit(self, slot: Slot, heir: Worker) -> None:
        """The old worker ended before its replacement was ready: the heir is the slot's worker now, unless none is wanted."""
        if slot.rest is Status.FAILED or not slot.wanted:
            self._supervisor.kill(heir, "shutdown", on_purpose=True)
            return
        slot.worker, slot.heir = heir, None
        self._supervisor.records.starting(heir)

    def _beside(self, slot: Slot, worker: Worker, row: ExitRow, now: float) -> None:
        """A worker that was not (or no longer) the slot's own: it says nothing about the slot, but a failed heir ends the try."""
        self._supervisor.records.side_end(row)
        if worker in slot.leaving:
            slot.leaving.remove(worker)
            return
        slot.heir = None
        self._recycling.over(slot)
        slot.spare_recycle_until = now + self._supervisor.settings.backoff_max
        if not worker.leave and not worker.on_purpose:
            what = ends.words(row.reason, row.code, row.signal)
            log.warning("%s: its replacement did not start (%s); the old one stays", slot.component, what)

    def _tell(self, slot: Slot, generation: int, before: Status, **more: object) -> None:
        self._supervisor.bus.send(WorkerMoved(slot.component, generation, before, slot.rest, **more))  # type: ignore[arg-type]
