"""Calls, as the plane serves them: a lease, the body to the worker and its answer back, byte for byte."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

from ostler.plane.access import Access
from ostler.plane.call import PATH, Call, Task, failure, head_at, head_for_worker, read_wishes, refused_by, target_at
from ostler.plane.forwarding import Forwarding
from ostler.plane.leases import Key, Leases, Place, Refusal, Terms
from ostler.plane.lending import Lender
from ostler.plane.plan import LATER, Forward, Plan, Refuse, Serve
from ostler.plane.records import Records
from ostler.plane.request import Request
from ostler.plane.timers import Timers
from ostler.plane.turns import Turns
from ostler.plane.upstream import Upstream

_TOLD = 0.5  # seconds between two reports to the node
_NEWS = 2.0  # seconds in which the node says what became of a worker
_CANCEL_GRACE = 2.0  # seconds in which a cancelled call ends before its worker is killed for it, where that is allowed


class Calls:
    """All calls of the plane."""

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self._loop = asyncio.get_running_loop()
        self.leases = Leases(say)
        self.turns = Turns()
        self.forwarding = Forwarding(self)
        self.lender = Lender(self)
        self._exclusive = False
        self._timers = Timers()
        self.tasks: dict[str, Task] = {}
        self.access: Access | None = None
        self.known = asyncio.Event()  # the node has said what there is
        self.max_body = 0
        self._upstreams: dict[tuple[Key, int, int], Upstream] = {}
        self._components: dict[Place, str] = {}
        self._served: dict[str, int] = {}
        self._ticking: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._reporting: asyncio.TimerHandle | None = None
        self._tails: dict[tuple[Key, int], tuple[str, list[str]]] = {}  # how workers ended, for those who were in them
        self.records = Records(
            say,
            time.monotonic,
            self._report_soon,
            dead=lambda key, generation: (key, generation) in self._tails,
            leave=self._left,
            lent=self.lender,
        )

    # ---- what the node says

    def heard(self, frame: list[Any]) -> None:
        match frame:
            case ["catalog", dict(told)]:
                self.access = Access.read(told["access"])
                self.max_body, self._exclusive = told["max_body"], told["exclusive"]
                self.tasks = {name: Task(name, task) for name, task in told["tasks"].items()}
                for key, line in self.leases.lines.items():
                    if key[0] in self.tasks:  # what was changed while it runs counts from the next call on
                        self.leases.change(line, self.tasks[key[0]].terms(key[1]))
                self.lender.recall_all()
                self.known.set()
            case ["up", task, model, replica, generation, socket, component]:
                self._up((task, model), replica, generation, socket, component)
            case ["down", task, model, replica, generation, reason, tail]:
                self._down((task, model), replica, generation, reason, tail)
            case ["fail", task, model, reason, seconds]:
                self._fail((task, model), reason, seconds)
            case ["close", task, model, replica, generation]:
                self._close((task, model), replica, generation)
            case ["evict", task, model, replica, generation]:
                self._evict((task, model), replica, generation)
            case ["peers", dict(told)]:
                self.forwarding.told(told)
        self._look()

    def _up(self, key: Key, replica: int, generation: int, socket: str, component: str) -> None:
        upstream = self._upstreams[key, replica, generation] = Upstream(socket)
        self.leases.line(key, self.tasks[key[0]].terms(key[1]))
        self.leases.up(key, replica, generation, upstream, self._loop.time())
        if place := self.leases.lines[key].places.get(replica):
            self._components[place] = component

    def _down(self, key: Key, replica: int, generation: int, reason: str, tail: list[str]) -> None:
        self._tails[key, generation] = (reason, tail)
        while len(self._tails) > 256:
            del self._tails[next(iter(self._tails))]
        place = self.leases.down(key, replica, generation, self._loop.time())
        if place is not None:
            self._components.pop(place, None)
        self.lender.forget(key, replica, generation)
        if upstream := self._upstreams.pop((key, replica, generation), None):
            upstream.close()

    def _fail(self, key: Key, reason: str, seconds: float | None) -> None:
        now = self._loop.time()
        until = math.inf if seconds is None else now + seconds
        message = f"{key[0]} {key[1]!r} cannot be used: {reason}"
        self.leases.fail(key, Refusal(503, "MODEL_FAILED", message), now, until)
        if seconds is None and (line := self.leases.lines.get(key)):
            line.broken_until = now + 1.0  # the node is asked again: somebody may have mended it

    def _close(self, key: Key, replica: int, generation: int) -> None:
        if self.leases.close(key, replica, generation):
            self._say("closed", *key, replica, generation)
        else:
            self.lender.recall(key)

    def _evict(self, key: Key, replica: int, generation: int) -> None:
        line = self.leases.lines.get(key)
        place = None if line is None else line.places.get(replica)
        if place is not None and place.generation == generation and self.lender.rests_in(place):
            # Only guests between two calls are in it: it is free as soon as they are back.
            self.leases.close(key, replica, generation)
            place.freeing = True
            self.lender.recall(key)
            return
        freed = self.leases.evict(key, replica, generation)
        if not freed:
            self.lender.recall(key)  # asked again, it may be free
        self._say("freed" if freed else "kept", *key, replica, generation)

    # ---- the clock

    def _look(self) -> None:
        """Look at idle workers and waiting calls when the next of them is due."""
        self._due = self.leases.tick(self._loop.time())
        if self._ticking is not None:
            self._ticking.cancel()
        self._ticking = self._loop.call_at(self._due, self._look)

    def _look_by(self, when: float) -> None:
        if when < self._due:
            if self._ticking is not None:
                self._ticking.cancel()
            self._due = when
            self._ticking = self._loop.call_at(when, self._look)

    def _report_soon(self) -> None:
        if self._reporting is None:
            self._reporting = self._loop.call_later(_TOLD, self.report)

    def report(self, *, last: bool = False) -> None:
        """Tell the node how it is."""
        self._reporting = None
        if self._served:
            self._say("served", self._served)
            self._served = {}
        self.records.report(last=last)
        self._say("facts", self.leases.facts(self._loop.time()), self.turns.holder is not None)

    # ---- a call

    def refusal(self, request: Request) -> Refuse | None:
        """Why its client may not call; None when it may."""
        if self.access is None:
            return Refuse(503, "STARTING", "the node is starting; try again", {"retry-after": "1"})
        why = self.access.refusal(request.method, request.path, request.query, request.headers, request.peer)
        return None if why is None else Refuse(why.status, why.code, why.message)

    def begin(self, request: Request, task: Task, model: Any) -> Plan:
        """Call that model; None: the client has named none, and there are several."""
        if model is None:
            known = ", ".join(sorted(task.models)) or "any"
            return Refuse(400, "NO_MODEL", f'{task.name} has several models: name one with "model"; known: {known}')
        if why := task.refusal(model, self.leases.lines):
            return why
        key = (task.name, model)
        line = self.leases.lines.get(key)
        terms = task.terms(model) if line is None else line.terms
        call = Call(self, request, key, self._loop.time())
        if task.path is not None:
            call.target = target_at(request, task.path) if request.path.startswith(PATH) else request.target
        if why := read_wishes(call, task):
            return why
        if self.forwarding.peers and (plan := self._elsewhere(call, terms)) is not None:
            return plan
        return self._start(call, terms)

    def _elsewhere(self, call: Call, terms: Terms) -> Plan:
        """Another node has a place for it, or has kept one here for it. None: it stays."""
        place = self.forwarding.kept(call.request, call.key)
        if place is not None:
            self.records.begin(call)
            return self.forward(call, place)
        if self.leases.is_free(call.key):
            return None
        ways = self.forwarding.ways(call.request, call.key)
        if not ways:
            return None
        return Serve(lambda _: self.forwarding.elsewhere(call, ways, lambda: self._start(call, terms)))

    def takes_turns(self, key: Key) -> bool:
        """Whether calls of this model wait for their turn on the GPU."""
        return self._exclusive and bool(self.tasks[key[0]].told(key[1])["gpu"])

    def _start(self, call: Call, terms: Terms) -> Plan:
        if not (self._exclusive and terms.gpu):
            return self._ask(call, terms)
        if len(self.turns) >= terms.queue:
            message = f"{len(self.turns)} calls are waiting for the GPU, and at most {terms.queue} may"
            refusal = Refusal(429, "BUSY", message, 1.0)
            self.records.refused(call, refusal)
            return refused_by(refusal, call)
        if self.turns.ask(call, lambda: call.request.go(self._in_turn(call, terms))):
            return self._in_turn(call, terms)
        call.request.gone = lambda _: self._left(call)
        call.clock = self._timers.at(call.deadline, self._no_turn, call)
        self.records.begin(call)
        self._report_soon()
        return None

    def _in_turn(self, call: Call, terms: Terms) -> Plan:
        """The load that it may cause and the call itself are one operation."""
        if call.clock is not None:
            call.clock.cancel()
            call.clock = None
        plan = self._ask(call, terms)
        if isinstance(plan, Refuse):
            self.turns.over(call)
        return plan

    def _no_turn(self, call: Call) -> None:
        call.clock = None
        call.refused(Refusal(504, "DEADLINE", f"{call.key[0]} {call.key[1]!r} did not get the GPU in time"))

    def _ask(self, call: Call, terms: Terms) -> Plan:
        if call.priority > 0:
            self.lender.recall(call.key)  # nobody is before it but who has begun
        found = self.leases.ask(call.key, terms, call, self._loop.time())
        if isinstance(found, Place):
            self.records.begin(call)
            return self.forward(call, found)
        if found is not None:
            self.records.refused(call, found)
            return refused_by(found, call)
        self.records.begin(call)
        call.request.gone = lambda _: self._left(call)
        self._report_soon()
        self._look_by(call.deadline)
        return None

    def _left(self, call: Call) -> None:
        if call.clock is not None:
            call.clock.cancel()
        self.leases.leave(call)
        self.turns.over(call)
        self.records.left(call)
        self._report_soon()

    # ---- in the worker

    def forward(self, call: Call, place: Place) -> Plan:
        """Let the worker have it."""
        now = self._loop.time()
        call.place, call.sent_at, call.sent = place, now, time.monotonic()
        until = min(call.deadline, now + call.timeout)
        call.clock = self._timers.at(until, self._overdue, call)
        self._report_soon()
        request = call.request
        if call.target is not None:
            return Forward(
                place.upstream,
                head_at(request, call),
                failed=lambda _, reason, sent: self._failed(call, reason, sent=sent),
                ended=lambda _, how: self._ended(call, how),
                max_body=self.max_body,
            )
        return Forward(
            place.upstream,
            head_for_worker(request, call, until - now),
            failed=lambda _, reason, sent: self._failed(call, reason, sent=sent),
            ended=lambda _, how: self._ended(call, how),
            max_body=self.max_body,
            lingers=True,
            left=(lambda _: self._impatient(call)) if call.kills else None,
        )

    def _impatient(self, call: Call) -> None:
        """Its caller has gone, and the model was told. Where it may be killed for that, it gets a moment to end by itself."""
        self._loop.call_later(_CANCEL_GRACE, self._still_there, call)

    def _still_there(self, call: Call) -> None:
        place = call.place
        if place is None:
            return
        if place.held > 1:  # others are in there with it
            self._loop.call_later(_CANCEL_GRACE, self._still_there, call)
            return
        why = f"call {call.id.decode()} was cancelled and did not end within {_CANCEL_GRACE:g} s (kill_on_cancel)"
        self._say("kill", *call.key, place.replica, place.generation, "call-cancelled", why)
        self.leases.close(call.key, place.replica, place.generation)

    def _release(self, call: Call, *, answered: bool) -> Place:
        """The call is over in its worker."""
        if call.clock is not None:
            call.clock.cancel()
            call.clock = None
        place, call.place = call.place, None
        assert place is not None
        self.turns.over(call)
        self.vacate(place, self._loop.time() - call.sent_at if answered else None)
        if answered:
            self.count(place, 1)
        return place

    def vacate(self, place: Place, seconds: float | None = None) -> None:
        """What held the place is over; `seconds` where it was a call that was answered."""
        self.leases.done(place, self._loop.time(), seconds)
        self.look_if_empty(place)
        self._report_soon()

    def look_if_empty(self, place: Place) -> None:
        """What follows when nobody is in a place any more."""
        line = place.line
        if not place.held and not place.guests:
            place.idle_since = self._loop.time()
            if line.closing.get(place.replica) == place.generation:
                self._say("freed" if place.freeing else "closed", *line.key, place.replica, place.generation)
            elif place.keep >= 0:
                self._look_by(place.idle_since + place.keep)

    def count(self, place: Place, calls: int) -> None:
        """So many calls were answered there."""
        if component := self._components.get(place):
            self._served[component] = self._served.get(component, 0) + calls

    def _ended(self, call: Call, how: str) -> None:
        if call.place is not None:
            self.records.ended(call, how)
            place = self._release(call, answered=how == "done")
            if how == "done" and call.request.seen is not None:
                self.lender.offer(call, place)

    def _failed(self, call: Call, reason: str, *, sent: bool) -> Plan:
        """No byte of an answer has come: the worker died, or could not be reached."""
        place = call.place
        assert place is not None
        self.lose(place)
        if sent or call.tried:
            self.records.died(call)
        self._release(call, answered=False)
        if not sent and not call.tried:  # it has not seen the call
            call.tried, call.sent = True, 0.0
            return self._start(call, place.line.terms) or LATER
        return self.death_of(place, call.name, reason)

    def death_of(self, place: Place, name: str, reason: str = "it closed its connections") -> Refuse:
        """What the caller of a call is told whose worker has ended."""
        key = place.line.key
        why, tail = self._tails.get((key, place.generation), (reason, []))
        said = f"; its last line: {tail[-1][:300]}" if tail else ""
        message = f"the worker of {key[0]} {key[1]!r} ended during the call ({why}){said}"
        return failure(502, "WORKER_DIED", message, name)

    def lose(self, place: Place) -> None:
        """A connection to the worker broke: nobody gets a place in it until the node has said what became of it."""
        if self.leases.lose(place):
            self._loop.call_later(_NEWS, self._unheard, place)

    def _unheard(self, place: Place) -> None:
        """A worker whose connections break is dead, and the node has said so by now. If not, it is of no use."""
        if place.line.closing.get(place.replica) == place.generation:
            where = *place.line.key, place.replica, place.generation
            self._say("kill", *where, "unreachable", "it breaks its connections")

    def _overdue(self, call: Call) -> None:
        """The call has not been answered in time: the client is told. A worker that has had all its time is stuck, and is killed."""
        call.clock = None
        place = call.place
        if place is None:
            return
        now = self._loop.time()
        ends = call.sent_at + call.timeout
        if now < ends:  # the client's patience is over: it is cancelled as if it had gone
            call.clock = self._timers.at(ends, self._overdue, call)
            waited = f"{call.deadline - call.asked:g} s"
            message = f"{call.key[0]} {call.key[1]!r} did not answer within the requested {waited}"
            call.request.abandon(failure(504, "DEADLINE", message, call.name))
        else:
            call.request.abandon(self.kill_for(place, call.name, call.timeout))

    def kill_for(self, place: Place, name: str, timeout: float) -> Refuse:
        """A call has had all its time: its worker is stuck. What its caller is told."""
        key = place.line.key
        why = f"call {name} took more than {timeout:g} s"
        self._say("kill", *key, place.replica, place.generation, "call-deadline", why)
        self.leases.close(key, place.replica, place.generation)
        message = f"{key[0]} {key[1]!r} did not answer within {timeout:g} s; its worker was killed"
        return failure(504, "DEADLINE", message, name)
