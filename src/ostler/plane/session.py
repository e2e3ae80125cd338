"""One session on its way through the plane: a slot, the node's consent, the worker's handshake (handshake.py), bytes, and one reason for its end.

    waiting ──granted──▶ admitting ──admitted──▶ dialling ──101──▶ live ──▶ over
       ▲                     │                      │ │             ├──▶ detached (sticky) ──▶ dialling, over
       └── asks again ◀──────┴──── this worker failed ┘ └──ticket──▶ redirected ──▶ over

The slot is free at the moment of the end, before anybody is told.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ostler.plane.handshake import Handshake
from ostler.plane.plan import LATER, Plan
from ostler.plane.relay import Early, Wish, refuse
from ostler.plane.request import Request
from ostler.sessions.bridge import Bridge
from ostler.sessions.line import Refusal
from ostler.sessions.selection import Key, Worker
from ostler.sessions.slots import Group
from ostler.sessions.splice import Limits, Splice

if TYPE_CHECKING:
    from ostler.plane.sessions import Sessions

_ADMIT = 60.0  # seconds that the node gets to say whether the session may begin
_UNUSED = 15.0  # a ticket that was not used by then never will be
CODES = dict.fromkeys(("idle", "longest", "killed", "silent", "slow"), 1008)
CODES |= dict.fromkeys(("drained", "shutdown"), 1001)
_LOST = 1011  # any other reason


class Session:
    """A client that wants a session, and then the session that it has. Each try with a worker has an id of its own."""

    number = 0
    id = ""
    worker: Worker | None = None
    splice: Splice | None = None
    state = "waiting"
    waited = 0.0

    def __init__(self, sessions: Sessions, request: Request, group: Group, wish: Wish) -> None:
        self._sessions = sessions
        self.request: Request | None = request
        self.group, self.wish = group, wish
        # As a ticket of the line:
        self.owner, self.priority = wish.caller.owner, wish.priority
        self.version, self.pool = wish.version, wish.pool
        self.excluded: set[Key] = set()
        self.asked = sessions.time()
        self.deadline = self.asked + wish.wait
        self._handshake = Handshake(self)
        self._clock: asyncio.TimerHandle | None = None
        self._is_left = False  # the client went away while the node was asked
        self._is_cut = ""  # … or its worker
        self._was_live = False
        self._bytes_in = self._bytes_out = 0  # of splices that are over

    # ---- a slot

    def ask(self) -> Plan:
        """For a slot; what its client is answered, or nothing yet."""
        found = self._sessions.slots.ask(self.group, self, self._sessions.time())
        if isinstance(found, Refusal):
            why = found
            return self._sessions.forwarding.or_else(self, lambda: self._in_vain(why))
        if found is not None:
            self.granted(found)
        elif self.request is not None:
            self.state = "waiting"
            self.request.gone = lambda _: self._left_line()
            self._sessions.waits(self)
        return LATER

    def granted(self, worker: Worker) -> None:
        """It has a slot: the node is asked for its consent, and writes the row."""
        sessions = self._sessions
        self.id, self.worker, self.state = secrets.token_hex(10), worker, "admitting"
        self._is_cut = ""
        self.waited = sessions.time() - self.asked
        sessions.say("admit", self.id, worker.component, worker.generation, self.wish.about(self))
        sessions.holds(self)
        assert self.request is not None
        self.request.gone = lambda _: self._left_early()
        self.wait(_ADMIT, self._unanswered)
        self._handshake.begin_ahead(worker, self.request)

    def refused(self, why: Refusal) -> None:
        """It waited in vain."""
        if self.request is not None:
            self.request.go(self._in_vain(why))

    def _in_vain(self, why: Refusal) -> Plan:
        if why.status == 429:
            self.group.counts["refused"] += 1
        self._sessions.forget(self)
        return refuse(why.status, why.code, why.message, retry=why.retry, position=why.position)

    def _left_line(self) -> None:
        self.group.counts["left"] += 1
        self._sessions.leaves(self)

    def _left_early(self) -> None:
        """The node's answer is awaited, for the row may be written already."""
        self._is_left = True
        self._handshake.drop()

    # ---- the node's answer

    def admitted(self, endpoint: dict[str, Any]) -> None:
        """The row is written, and the worker knows of it."""
        if self.state != "admitting":
            return
        self.wait(None)
        if self._is_cut and not self._is_left:
            assert self.request is not None
            self.request.go(self.try_next(self._is_cut, strike=False))
            return
        self.group.counts["admitted"] += 1
        if self._is_left:
            self.over("client", "the client left before the session began", 1006)
            return
        assert self.request is not None
        if "ticket" in endpoint and self.wish.may_redirect:
            self._redirect(str(endpoint["ticket"]))
        else:
            self._handshake.begin(self.request, endpoint)

    def declined(self, code: str, text: str, seconds: float | None) -> None:
        """The node says no: this worker is of no use, or the registry is not to be had."""
        if self.state != "admitting":
            return
        self.wait(None)
        worker, request = self._give_back(), self.request
        if self._is_left or request is None:
            self._sessions.forget(self)
        elif code == "worker":
            self.excluded.add(worker.key)
            request.go(self.ask())
        else:
            self.group.counts["refused"] += 1
            self._sessions.forget(self)
            retry = 1.0 if seconds is None else seconds
            request.go(refuse(503, "REGISTRY", f"the session cannot be registered: {text}", retry=retry))
        self._free(worker)

    def _give_back(self) -> Worker:
        """The slot of a session that has never begun; `_free` it afterwards, so that this client comes first."""
        worker = self.worker
        assert worker is not None
        self._handshake.drop()
        self._sessions.lets_go(self)
        self.worker, self.id = None, ""
        self._sessions.slots.undone(worker)
        return worker

    def _free(self, worker: Worker) -> None:
        self._sessions.freed(worker, self.owner)

    def _unanswered(self) -> None:
        sessions, request = self._sessions, self.request
        sessions.say("ended", self.id, "relay-lost", self._sums("the node did not answer", 0))
        worker = self._give_back()
        sessions.forget(self)
        self.group.counts["refused"] += 1
        if request is not None:
            message = f"the node did not register the session within {_ADMIT:g} s"
            request.go(refuse(503, "REGISTRY", message, retry=5.0))
        self._free(worker)

    def try_next(self, reason: str, *, strike: bool = True) -> Plan:
        """This worker is of no use to this client: the next one is tried."""
        sessions, worker = self._sessions, self.worker
        assert worker is not None
        self.wait(None)
        self._handshake.drop()
        if strike:
            sessions.strike(worker, reason)
        if self._was_live:
            self.over("worker", reason, 0)
            message = f"the session {self.wish.key!r} is lost: {reason}; connect again for a new one"
            return refuse(410, "SESSION_LOST", message)
        self.excluded.add(worker.key)
        sessions.say("ended", self.id, "refused", self._sums(reason, 0))
        sessions.lets_go(self)
        self.worker, self.id = None, ""
        plan = self.ask()
        self._free(worker)
        return plan

    # ---- live

    def join(self, request: Request, worker: asyncio.Transport, head: bytes, early: bytes | Early) -> None:
        """Both have agreed: the two connections are one from now on."""
        self.wait(None)
        terms, is_raw = self.terms, isinstance(early, Early)
        self.state, self.request = "live", None
        client, after = request.hand_over()
        client.write(head)  # before all else: the client can begin meanwhile
        limits = Limits(terms.get("idle", 0.0), terms.get("longest", 0.0), terms.get("ping", 0.0))
        websocket = request.protocol == b"websocket"
        kind = Bridge if is_raw and websocket else Splice
        splice = kind(
            client.transport, worker, limits, self._spliced, client.gone, websocket=websocket, lend=self._lend
        )
        self.splice, self._was_live = splice, True
        self._sessions.began(self)
        splice.start(to_client=early.data if isinstance(early, Early) else early, to_worker=after)

    @property
    def _lend(self) -> Callable[[Splice], None] | None:
        """How its client is lent to the worker, where that takes connections."""
        path = self.worker.endpoint.get("lends") if self.worker is not None else None
        return self._sessions.lenders.way(path, self.id) if path else None

    def _spliced(self, splice: Splice) -> None:
        """The client or the worker has gone, or a limit was reached."""
        assert splice.end is not None
        self.splice = None
        self._bytes_in += splice.bytes_in
        self._bytes_out += splice.bytes_out
        if splice.end.reason in ("client", "silent"):  # it left, or its network did
            self.client_gone(*splice.end)
        else:
            self.over(*splice.end)

    # ---- sticky

    def client_gone(self, reason: str, text: str, code: int) -> None:
        """Its client has gone, and may come back where it said that it would."""
        seconds = float(self.terms.get("sticky") or 0.0)
        if self.wish.key is None or not seconds or not self._was_live:
            self.over(reason, text, code)
            return
        self.state, self.request = "detached", None
        self.wait(seconds, lambda: self.over("detached", f"nobody came back within {seconds:g} s", code))

    def attach(self, request: Request, wish: Wish) -> Plan:
        """Its client is back."""
        self.request, self.wish = request, wish
        return self._handshake.dial(request)

    # ---- the end

    def end(self, reason: str, text: str, *, gone: bool = False) -> None:
        """It is to end now, whatever it is doing. One that has not begun is tried elsewhere. `gone`: there is no worker any more."""
        said = text if text.startswith("ostler: ") else f"ostler: {text}"
        code = CODES.get(reason, _LOST)
        if self.splice is not None:
            self.splice.finish(reason, said, code)
        elif self.state == "dialling" and self.request is not None:
            self.request.abandon(self.try_next(text, strike=False))
        elif self.state == "admitting":
            self._is_cut = text
            if gone:
                self.admitted({})
        elif self.worker is not None:
            self.over(reason, said, code)

    def kill(self, reason: str, text: str) -> None:
        """Somebody has it ended."""
        if self.state in ("admitting", "dialling") and (request := self.request) is not None:
            self.over(reason, text, CODES.get(reason, _LOST))
            request.abandon(refuse(503, "KILLED", f"the session was ended before it began: {text}", retry=1.0))
        else:
            self.end(reason, text)

    def over(self, reason: str, text: str, code: int) -> None:
        """It is over: its slot goes to the head of the line, and the node is told."""
        worker, sessions = self.worker, self._sessions
        if worker is None:
            return
        self.wait(None)
        self._handshake.drop()
        self.state = "over"
        self.group.counts["bytes_in"] += self._bytes_in
        self.group.counts["bytes_out"] += self._bytes_out
        sessions.say("ended", self.id, reason, self._sums(text, code))
        sessions.lets_go(self)
        sessions.forget(self)
        self.worker = self.request = None
        self._free(worker)

    def _sums(self, text: str, code: int) -> dict[str, Any]:
        return {"text": text, "code": code, "bytes_in": self._bytes_in, "bytes_out": self._bytes_out}

    def _redirect(self, ticket: str) -> None:
        assert self.worker is not None
        assert self.request is not None
        request, self.request, self.state = self.request, None, "redirected"
        request.go(self.wish.redirect(request, self.id, self.worker.endpoint["door"], ticket))
        self.wait(_UNUSED, lambda: self.over("unused", "the ticket was not used in time", 0))

    def used(self) -> None:
        """Its ticket was."""
        self.wait(None)

    def closed_at_door(self, reason: str, sums: dict[str, Any]) -> None:
        """A redirected session has ended."""
        self._bytes_in, self._bytes_out = int(sums.get("bytes_in", 0)), int(sums.get("bytes_out", 0))
        self.over(reason, str(sums.get("text", "")), int(sums.get("code", 0)))

    # ---- what is known of it

    @property
    def terms(self) -> dict[str, Any]:
        """Of its worker's pool."""
        return self.group.pools.get(self.worker.pool, {}) if self.worker is not None else {}

    def facts(self) -> list[Any]:
        shown = {"live": "live", "redirected": "live", "detached": "detached"}.get(self.state, "opening")
        now_in, now_out, idle = (s.bytes_in, s.bytes_out, s.idle) if (s := self.splice) is not None else (0, 0, 0.0)
        return [self._bytes_in + now_in, self._bytes_out + now_out, round(idle, 1), shown]

    def wait(self, seconds: float | None, then: Any = None) -> None:
        """Call that in so many seconds, instead of what was to be called before; None: nothing."""
        if self._clock is not None:
            self._clock.cancel()
        self._clock = None if seconds is None else asyncio.get_running_loop().call_later(seconds, then)
