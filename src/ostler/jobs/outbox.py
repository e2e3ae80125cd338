"""What is to be written of jobs: gathered between two turns, written in one transaction with the next claims."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ostler.errors import NodeLost
from ostler.events import Bus, ClaimLost, ClaimMissed, JobEnded, JobsTouched, JobTook, RunsDone
from ostler.jobs import verdict
from ostler.jobs.verdict import Ran
from ostler.lifecycle.membership import Membership
from ostler.store import now_ms
from ostler.store.lanes import Lane
from ostler.store.limits import QueueLimit
from ostler.store.rows import Finish, Note, Requeue, Taken, Turn
from ostler.store.store import Store

log = logging.getLogger("ostler.jobs")

_LONG = 1.0  # seconds of a run that is worth a line in the log
REFUSED = 10.0  # seconds after which an end that the store refused is told again
_WRONG = 1000  # milliseconds between our clock and the store's from which on times are set right


class Outbox:
    """Ends and notes of running jobs on their way to the store. Nothing leaves it before the store has it."""

    def __init__(self, member: Membership, tasks: frozenset[str] | None, lane: Lane, bus: Bus) -> None:
        self._member, self._tasks, self._lane, self._bus = member, tasks, lane, bus
        self._turns = 0
        self._finishes: list[Finish] = []
        self._requeues: list[Requeue] = []
        self._notes: list[Note] = []
        # Ends that the store takes neither with others nor alone, nor as a failure; and when they are told again (monotonic)
        self._refused: list[Finish | Requeue] = []
        self._again = 0.0
        self._done: list[tuple[str, str, float]] = []  # (task, queue, seconds): what the bus is told with the next turn

    def end(self, result: Finish | Requeue) -> None:
        """A claim has ended."""
        if isinstance(result, Finish):
            self._finishes.append(result)
        else:
            self._requeues.append(result)

    def ran(self, ran: Ran, result: Finish | Requeue) -> None:
        """A run has ended, and those who listen are told."""
        self.end(result)
        claim = ran.claim
        seconds = (ran.ended - ran.began) / 1000
        if result.event == "done":
            self._done.append((claim.task, claim.queue, seconds))
            if seconds > _LONG:
                self._bus.send(JobTook(claim.id, claim.task, claim.worker, seconds))
            return
        error = json.loads(result.error) if result.error else {}
        said = (error.get("code"), error.get("message"), claim.attempt, claim.attempts)
        self._bus.send(JobEnded(claim.id, claim.task, claim.queue, claim.worker, result.event, seconds, *said))

    def note(self, note: Note) -> None:
        """A running job reported something."""
        self._notes.append(note)

    def collect(self, wants: dict[str, list[str]], limits: Mapping[str, QueueLimit]) -> Turn | None:
        """The next turn: all that is here, and these wants. None when there is nothing to do."""
        if self._done:
            self._bus.send(RunsDone(self._done))
            self._done = []
        if self._refused and time.monotonic() >= self._again:
            self.try_again()
        if not (wants or self._finishes or self._requeues or self._notes):
            return None
        turn = self._turn(self._notes, self._finishes, self._requeues, wants, limits)
        self._notes, self._finishes, self._requeues = [], [], []
        return turn

    def _turn(
        self,
        notes: list[Note],
        finishes: list[Finish],
        requeues: list[Requeue],
        wants: dict[str, list[str]] | None = None,
        limits: Mapping[str, QueueLimit] | None = None,
    ) -> Turn:
        self._turns += 1
        node, number, tasks = self._member.id, self._turns, self._tasks
        return Turn(node, now_ms(), notes, finishes, requeues, wants or {}, limits or {}, number, tasks)

    def ended(self) -> set[tuple[int, int]]:
        """The claims (id, fence) that have ended here and that the store still takes for running."""
        return {(end.id, end.fence) for ends in (self._finishes, self._requeues, self._refused) for end in ends}

    def forget(self) -> None:
        """Drop everything: it belongs to claims that are no longer ours."""
        self._done, self._refused = [], []
        self._notes, self._finishes, self._requeues = [], [], []

    def try_again(self) -> None:
        """The next turn has what the store has refused."""
        refused, self._refused = self._refused, []
        for end in refused:
            self.end(end)

    def put_back(self, turn: Turn) -> None:
        """The store did not take the turn."""
        self._notes = turn.notes + self._notes
        self._finishes = turn.finishes + self._finishes
        self._requeues = turn.requeues + self._requeues

    async def write(self, turn: Turn, patience: float | None = None) -> Taken:
        """Have the store take the turn. It has a number, so it may be tried again after a doubt."""
        return await self._lane.call(partial(_take, turn=turn), patience=patience, known=True)

    def tell(self, turn: Turn, taken: Taken) -> None:
        """Tell those who listen what came of the turn."""
        if taken.missed:
            self._bus.send(ClaimMissed(taken.missed))
        for job in taken.lost:
            log.warning("job %d: a late result was dropped, its claim was lost", job)
            self._bus.send(ClaimLost(job))
        self._bus.send(
            JobsTouched([row.id for rows in (turn.notes, turn.finishes, turn.requeues, taken.claims) for row in rows])
        )

    async def write_one_by_one(self, turn: Turn) -> None:
        """One item that the store refuses must not hold up all others for ever: its job fails with a code that says so.

        Raises NodeLost when this node was declared dead.
        """
        for note in turn.notes:
            try:
                await self._write_and_tell(self._turn([note], [], []))
            except NodeLost:
                raise
            except Exception as error:  # noqa: BLE001  a timeline can do without it
                log.warning("job %d: its event %r could not be stored: %s", note.id, note.event, error)
        alone: list[tuple[int, int, list[Finish], list[Requeue]]]
        alone = [(f.id, f.fence, [f], []) for f in turn.finishes] + [(r.id, r.fence, [], [r]) for r in turn.requeues]
        for job, fence, finishes, requeues in alone:
            try:
                await self._write_and_tell(self._turn([], finishes, requeues))
            except NodeLost:
                raise
            except Exception as error:
                log.exception("job %d: the end of its run could not be stored", job)
                what = verdict.error("INTERNAL", f"the end of its run could not be stored: {error}")
                failed = Finish(job, fence, "failed", turn.now, turn.now, "failed", error=what)
                try:
                    await self._write_and_tell(self._turn([], [failed], []))
                except NodeLost:
                    raise
                except Exception:  # noqa: BLE001  it is not this end that the store refuses; the error is the same
                    self._refused += [*finishes, *requeues]
                    self._again = time.monotonic() + REFUSED

    async def _write_and_tell(self, turn: Turn) -> None:
        self.tell(turn, await self.write(turn))


def _take(store: Store, turn: Turn) -> Taken:
    """The turn at the store's time. When the next job is due is told by our own clock, which may be set differently."""
    now = store.now()
    taken = store.turns.take(_set_right(replace(turn, now=now), now_ms() - now))
    ahead = now_ms() - store.now()
    return taken if taken.next_due is None else replace(taken, next_due=taken.next_due + ahead)


def _set_right(turn: Turn, ahead: int) -> Turn:
    """The turn with its times by the store's clock. By a clock that is an hour off, a retry would run at once, or an hour late."""
    if abs(ahead) < _WRONG:
        return turn
    return replace(
        turn,
        notes=[n._replace(at=n.at - ahead) for n in turn.notes],
        finishes=[
            f._replace(started_at=f.started_at - ahead, finished_at=f.finished_at - ahead) for f in turn.finishes
        ],
        requeues=[
            r._replace(at=r.at - ahead, run_at=None if r.run_at is None else r.run_at - ahead) for r in turn.requeues
        ],
    )
