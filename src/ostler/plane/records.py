"""What the plane remembers of calls: those under way, which can be listed and cancelled, and those that have ended, for the node.

Every ended call is counted. For the log, each report takes a bounded number of them: a sample of those that went well, failures
before all others, and of refusals only a few. How many were left out is told with it.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from ostler.calls.tally import Tally
from ostler.plane.leases import Key, Refusal
from ostler.plane.plan import Plan, Refuse, Reply

if TYPE_CHECKING:
    from ostler.plane.call import Call
    from ostler.plane.leases import Place
    from ostler.plane.lending import Lender
    from ostler.plane.request import Request

RUNNING = "running"  # the name of the list, where others have a task's
CANCELLED = 499
_MOST = {"done": 200, "refused": 20}  # rows of one report, by outcome
_MOST_FAILED = 200  # … of all other outcomes together
_NEWS = 0.3  # seconds in which the node says that a worker has ended
_SHOWN = 1000  # calls under way that are listed
_STATUS = {"left": CANCELLED, "late": 504, "cut": 502, "refused": 413}  # where no answer has begun
_JSON = {"content-type": "application/json", "cache-control": "no-store"}


class _Sample:
    """Some of many: all, or as many as there may be with the same chance for each."""

    def __init__(self, most: int) -> None:
        self._most, self.seen, self.rows = most, 0, list[list[Any]]()
        self._place = 0

    def takes(self) -> bool:
        """Another one came: whether it is among them, so that `put` follows."""
        self.seen += 1
        self._place = self.seen - 1 if self.seen <= self._most else int(random.random() * self.seen)  # noqa: S311
        return self._place < self._most

    def put(self, row: list[Any]) -> None:
        self.rows[self._place : self._place + 1] = [row]


class _Ending(NamedTuple):
    """A call that has ended, and where and when."""

    call: Call
    worker: tuple[int, int]  # replica and generation
    at: float
    sent: float | None  # when it got its place
    status: int
    code: str | None


def _row(ending: _Ending, outcome: str, asked: float, waited: float, took: float | None) -> list[Any]:
    """As it travels to the node; `CallLog.take` reads it."""
    call, request = ending.call, ending.call.request
    return [
        call.id.decode("latin-1"),
        *call.key,
        *ending.worker,
        round(asked * 1000),
        round(waited * 1000, 3),
        None if took is None else round(took * 1000, 3),
        request.received,
        request.sent,
        ending.status,
        outcome,
        ending.code,
        int(request.streamed),
    ]


class Records:
    """The plane's calls, under way and ended. `dead(key, generation)` tells whether that worker is known to have ended; `leave(call)`
    takes one out of its line, and then says `left`.
    """

    def __init__(
        self,
        say: Callable[..., None],
        clock: Callable[[], float],
        soon: Callable[[], None],
        dead: Callable[[Key, int], bool],
        leave: Callable[[Call], None],
        lent: Lender | None = None,
    ) -> None:
        self._say, self._clock, self._soon, self._dead, self._leave = say, clock, soon, dead, leave
        self._lender = lent
        self.running: dict[Call, None] = {}  # in the order in which they came
        self._samples: dict[str, _Sample] = {}
        self._tallies: dict[Key, Tally] = {}
        self._cut: list[_Ending] = []  # answers that broke off: the worker died, or the model raised in mid-stream

    # ---- what becomes of a call

    def begin(self, call: Call) -> None:
        """It has a place, or waits for one."""
        self.running[call] = None

    def refused(self, call: Call, why: Refusal) -> None:
        """It got no place."""
        self._end(call, "deadline" if why.code == "DEADLINE" else "refused", why.status, why.code)

    def left(self, call: Call) -> None:
        """It was taken out of its line: its client has gone, or it was cancelled."""
        if call in self.running:
            self._end(call, "cancelled", CANCELLED, call.verdict.upper() or "LEFT")

    def died(self, call: Call) -> None:
        """Its worker ended without an answer."""
        self._end(call, "died", 502, "WORKER_DIED")

    def ended(self, call: Call, how: str) -> None:
        """It was in a worker, and its forwarding ended (see `plan.Forward`). Call it while the call still has its place."""
        status = call.request.status or (CANCELLED if call.verdict == "cancelled" else _STATUS.get(how, 502))
        if how == "done":
            self._end(call, "done" if status < 400 else "error", status, None)
        elif how == "late":
            self._end(call, call.verdict or "deadline", status, call.verdict.upper() or "DEADLINE")
        elif how == "left":
            self._end(call, "cancelled", status, "LEFT")
        elif how == "refused":
            self._end(call, "refused", status, "PAYLOAD_TOO_LARGE")
        else:
            self._end(call, "cut", status, None)

    def _end(self, call: Call, outcome: str, status: int, code: str | None) -> None:
        self.running.pop(call, None)
        now, place = self._clock(), call.place
        worker = (-1, -1) if place is None else (place.replica, place.generation)
        ending = _Ending(call, worker, now, call.sent or None, status, code)
        if outcome == "cut":
            self._cut.append(ending)
        else:
            self._note(ending, outcome)
        self._soon()

    def _note(self, ending: _Ending, outcome: str) -> None:
        call, _, now, sent, *_ = ending
        request = call.request
        waited, took = (sent or now) - call.came, None if sent is None else now - sent
        if sample := self._count(call.key, outcome, waited, took, request.received, request.sent):
            wall = time.time() - self._clock() + call.came
            sample.put(_row(ending, outcome, wall, waited, took))

    def _count(
        self, key: Key, outcome: str, waited: float, took: float | None, bytes_in: int, bytes_out: int
    ) -> _Sample | None:
        """Count an ended call; where its row is put, if it is told as well."""
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = Tally()
        tally.add(outcome, waited, took, bytes_in, bytes_out)
        kind = outcome if outcome in _MOST else "failed"
        sample = self._samples.get(kind)
        if sample is None:
            sample = self._samples[kind] = _Sample(_MOST.get(kind, _MOST_FAILED))
        return sample if sample.takes() else None

    def lent(self, place: Place, loan: str, rows: list[list[Any]]) -> None:
        """A worker has answered these calls of a connection that is lent to it: number, seconds, bytes in and out, status."""
        for number, took, bytes_in, bytes_out, status in rows:
            outcome = "done" if status < 400 else "error"
            self._lent(place, f"{loan}-{number}", outcome, took, (bytes_in, bytes_out), status, None)
        self._soon()

    def lent_lost(self, place: Place, name: str, took: float, why: Refuse | None) -> None:
        """A call of such a connection has ended without its answer. `why` None: its client has gone."""
        if why is None:
            self._lent(place, name, "cancelled", took, (0, 0), CANCELLED, "LEFT")
        else:
            outcome = {"DEADLINE": "deadline", "CANCELLED": "cancelled"}.get(why.code, "died")
            self._lent(place, name, outcome, took, (0, 0), why.status, why.code)
        self._soon()

    def _lent(
        self, place: Place, name: str, outcome: str, took: float, size: tuple[int, int], status: int, code: str | None
    ) -> None:
        key, worker = place.line.key, (place.replica, place.generation)
        if sample := self._count(key, outcome, 0.0, took, *size):
            asked, took = round((time.time() - took) * 1000), round(took * 1000, 3)
            sample.put([name, *key, *worker, asked, 0.0, took, *size, status, outcome, code, 0])

    def report(self, *, last: bool = False) -> None:
        """Tell the node of all that ended since the last report."""
        while self._cut and (last or self._clock() - self._cut[0].at >= _NEWS):
            ending = self._cut.pop(0)
            self._note(ending, "died" if self._dead(ending.call.key, ending.worker[1]) else "error")
        if self._cut:
            self._soon()
        if not self._tallies:
            return
        rows = [row for sample in self._samples.values() for row in sample.rows]
        left = {kind: n for kind, s in self._samples.items() if (n := s.seen - len(s.rows))}
        told = [[*key, tally.frame()] for key, tally in self._tallies.items()]
        self._samples, self._tallies = {}, {}
        self._say("calls", rows, left, told)

    # ---- what operators ask

    def route(self, request: Request, rest: str) -> Plan:
        """GET /api/v1/calls/running and DELETE /api/v1/calls/{request id}; None: something else is asked for. `rest` is the path behind
        /calls/, as it came: a slash in an id is escaped.
        """
        if "/" in rest:
            return None
        name = unquote(rest)
        if request.method in ("GET", "HEAD") and name == RUNNING:
            return Reply(200, _JSON, json.dumps(self.listing()).encode())
        if name == RUNNING:
            return Refuse(405, "METHOD_NOT_ALLOWED", f"{request.path} takes GET", {"allow": "GET"})
        if request.method == "DELETE":
            found = self.cancel(name)
            if not found:
                return Refuse(
                    404, "NOT_FOUND", f"no call {name[:128]!r} is in progress; it has ended, or was never here"
                )
            return Reply(202, _JSON, json.dumps({"ok": True, "action": "cancel", "calls": found}).encode())
        return None

    def listing(self) -> dict[str, Any]:
        """The calls under way, oldest first."""
        now, wall = self._clock(), time.time()
        lent = [] if self._lender is None else self._lender.listing(now, wall)
        shown = [self._shown(call, now, wall) for call in [*self.running][:_SHOWN]] + lent
        return {"calls": shown, "total": len(self.running) + len(lent)}

    def _shown(self, call: Call, now: float, wall: float) -> dict[str, Any]:
        request, place = call.request, call.place
        if place is None:
            state = "waiting"
        elif request.is_over:
            state = "leaving"
        else:
            state = "streaming" if request.status else "running"
        return {
            "request": call.id.decode("latin-1"),
            "task": call.key[0],
            "model": call.key[1],
            "replica": None if place is None else place.replica,
            "state": state,
            "priority": call.priority,
            "asked_at": round((wall - (now - call.came)) * 1000),
            "waited_ms": round(((call.sent if place else now) - call.came) * 1000, 3),
            "running_ms": round((now - call.sent) * 1000, 3) if place else None,
            "bytes_in": request.received,
            "bytes_out": request.sent,
        }

    def cancel(self, name: str) -> int:
        """Cancel the calls of that id, in line or in their worker; how many there were. Their callers are told."""
        found = [call for call in self.running if call.id.decode("latin-1") == name]
        for call in found:
            refusal = Refusal(CANCELLED, "CANCELLED", f"call {name} was cancelled by an operator")
            plan = Refuse(*refusal[:3], {"x-ostler-request-id": name})
            call.verdict = call.verdict or "cancelled"
            if call.place is None:
                self._leave(call)
                call.request.go(plan)
            else:
                call.request.abandon(plan, "it was cancelled by an operator")
        return len(found) + (0 if self._lender is None else self._lender.cancel(name))
