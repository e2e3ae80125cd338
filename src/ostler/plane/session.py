"""One session on its way through the plane: a slot, the node's consent, the worker's handshake, bytes, and one reason for its end.

    waiting ──granted──▶ admitting ──admitted──▶ dialling ──101──▶ live ──▶ over
       ▲                     │                      │ │             ├──▶ detached (sticky) ──▶ dialling, over
       └── asks again ◀──────┴──── this worker failed ┘ └──ticket──▶ redirected ──▶ over

The slot is free at the moment of the end, before anybody is told.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

from ostler.plane.ahead import Ahead
from ostler.plane.answer import switching
from ostler.plane.plan import LATER, Plan, Relay
from ostler.plane.relay import SESSION, Early, Wish, dial, refuse, switching_raw
from ostler.plane.request import Request
from ostler.plane.upstream import Head, Link, Upstream
from ostler.sessions.bridge import Bridge
from ostler.sessions.line import Refusal
from ostler.sessions.selection import Key, Worker
from ostler.sessions.slots import Group
from ostler.sessions.splice import Limits, Splice

if TYPE_CHECKING:
    from ostler.plane.sessions import Sessions

HEAD = 5.0  # seconds that a worker gets to answer the handshake
_ADMIT = 60.0  # … and the node to say whether the session may begin
_UNUSED = 15.0  # a ticket that was not used by then never will be
CODES = {
    "idle": 1008,
    "longest": 1008,
    "killed": 1008,
    "silent": 1008,
    "slow": 1008,
    "drained": 1001,
    "shutdown": 1001,
}
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
        self._endpoint: dict[str, Any] = {}
        self._ahead: Ahead | None = None
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
        sessions.holds(self)
        assert self.request is not None
        self.request.gone = lambda _: self._left_early()
        self._wait(_ADMIT, self._unanswered)
        sessions.say("admit", self.id, worker.component, worker.generation, self.wish.about(self))
        self._begin_ahead(worker, self.request)

    def _begin_ahead(self, worker: Worker, request: Request) -> None:
        """While the node is asked: where the worker's endpoint is every session's, its handshake can begin."""
        terms, endpoint = self._terms, worker.endpoint
        if endpoint.get("opens") or terms.get("redirect") or terms.get("protocol") == "tcp" or not endpoint["address"]:
            return
        head = self.wish.handshake(request, endpoint.get("path") or "/", self.id)
        self._ahead = Ahead(endpoint["address"], head + b"\r\n")

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.cancel()
            self._ahead = None

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
        self._drop_ahead()

    # ---- the node's answer

    def admitted(self, endpoint: dict[str, Any]) -> None:
        """The row is written, and the worker knows of it."""
        if self.state != "admitting":
            return
        self._wait(None)
        self._endpoint = endpoint
        if self._is_cut and not self._is_left:
            assert self.request is not None
            self.request.go(self._next(self._is_cut, strike=False))
            return
        self.group.counts["admitted"] += 1
        if self._is_left:
            self.over("client", "the client left before the session began", 1006)
            return
        assert self.request is not None
        if "ticket" in endpoint and self.wish.may_redirect:
            self._redirect(str(endpoint["ticket"]))
        elif self._ahead is not None and self._is_own(endpoint):
            self.state = "dialling"
            self._wait(HEAD, self._no_head)
            self.request.gone = lambda _: self._answered("left")
            self._ahead.then(self._met)
        else:
            self._drop_ahead()
            self.request.go(self.dial())

    def _is_own(self, endpoint: dict[str, Any]) -> bool:
        """Whether that is the endpoint of the worker itself."""
        assert self.worker is not None
        own = self.worker.endpoint
        return all(not endpoint.get(name) or endpoint[name] == own.get(name) for name in ("address", "path"))

    def _met(self) -> None:
        """The handshake that was begun ahead has come to an end. One that failed is tried in the ordinary way, which knows what to do."""
        ahead, request, self._ahead = self._ahead, self.request, None
        if ahead is None or request is None:
            return
        request.gone = None
        if ahead.head is None:
            request.go(self.dial())
        else:
            head, transport, rest = ahead.take()
            self._join(request, transport, switching(head, [(SESSION, self.id.encode())]), rest)

    def declined(self, code: str, text: str, seconds: float | None) -> None:
        """The node says no: this worker is of no use, or the registry is not to be had."""
        if self.state != "admitting":
            return
        self._wait(None)
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
        self._drop_ahead()
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

    # ---- the worker's handshake

    def dial(self) -> Plan:
        """Connect to the worker."""
        self.state = "dialling"
        assert self.worker is not None
        assert self.request is not None
        address = self._endpoint.get("address") or self.worker.endpoint["address"]
        if self._terms.get("protocol") == "tcp":
            return self._dial_raw(self.request, address)
        upstream = Upstream(address)
        upstream.closed = True  # its connections are used once
        self._wait(HEAD, self._no_head)
        path = self._endpoint.get("path") or self.worker.endpoint.get("path") or "/"
        return Relay(
            upstream,
            self.wish.handshake(self.request, path, self.id),
            failed=lambda _, reason, __: self._next(reason),
            ended=lambda _, how: self._answered(how),
            switched=self._switched,
            declined=self._answers,
        )

    def _dial_raw(self, request: Request, address: str) -> Plan:
        """Not a Serve: its task is cancelled before it begins when the client leaves at that moment, and the slot would be lost."""
        self._wait(None)
        request.gone = lambda _: self._answered("left")
        id_, dialling = self.id, asyncio.get_running_loop().create_task(dial(address, HEAD))

        def dialled(_: object) -> None:
            if dialling.cancelled():  # the plane's process ends
                return
            error = dialling.exception()
            if (
                self.state != "dialling" or self.id != id_ or self.request is not request
            ):  # it is over, or tried elsewhere
                if error is None:
                    dialling.result()[0].abort()
                return
            request.gone = None
            if error is not None:
                request.go(self._next(f"cannot connect: {error}"))
                return
            transport, early = dialling.result()
            self._join(request, transport, switching_raw(request, id_), early)

        dialling.add_done_callback(dialled)
        return LATER

    @property
    def _terms(self) -> dict[str, Any]:
        return self.group.pools.get(self.worker.pool, {}) if self.worker is not None else {}

    def _no_head(self) -> None:
        if self.request is not None:
            self.request.abandon(self._next(f"it did not answer the handshake within {HEAD:g} s"))

    def _next(self, reason: str, *, strike: bool = True) -> Plan:
        """This worker is of no use to this client: the next one is tried."""
        sessions, worker = self._sessions, self.worker
        assert worker is not None
        self._wait(None)
        self._drop_ahead()
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

    def _answers(self, _: Request, head: Head) -> Plan:
        """An answer that is no 101: the client gets it, unless the worker itself is in trouble."""
        self._wait(None)
        if head.status >= 500:
            return self._next(f"it answered the handshake with {head.status}")
        self.state = f"answered {head.status}"
        return None

    def _answered(self, how: str) -> None:
        """… and has got it, or has left meanwhile."""
        if how == "late" or self.worker is None:
            return
        self._wait(None)
        if self.state == "dialling":
            self._client_gone("client", "the client left during the handshake", 1006)
        else:
            self.over("refused", f"the worker {self.state} to the handshake", 0)

    # ---- live

    def _switched(self, request: Request, head: Head, link: Link, rest: bytes) -> None:
        self._join(request, link.hand_over(), switching(head, [(SESSION, self.id.encode())]), rest)

    def _join(self, request: Request, worker: asyncio.Transport, head: bytes, early: bytes | Early) -> None:
        """Both have agreed: the two connections are one from now on."""
        self._wait(None)
        terms, is_raw = self._terms, isinstance(early, Early)
        self.state, self.request = "live", None
        client, after = request.hand_over()
        limits = Limits(terms.get("idle", 0.0), terms.get("longest", 0.0), terms.get("ping", 0.0))
        websocket = request.protocol == b"websocket"
        kind = Bridge if is_raw and websocket else Splice
        splice = kind(client.transport, worker, limits, self._spliced, client.gone, websocket=websocket)
        self.splice, self._was_live = splice, True
        client.write(head)
        self._sessions.began(self)
        splice.start(to_client=early.data if isinstance(early, Early) else early, to_worker=after)

    def _spliced(self, splice: Splice) -> None:
        """The client or the worker has gone, or a limit was reached."""
        assert splice.end is not None
        self.splice = None
        self._bytes_in += splice.bytes_in
        self._bytes_out += splice.bytes_out
        if splice.end.reason in ("client", "silent"):  # it left, or its network did
            self._client_gone(*splice.end)
        else:
            self.over(*splice.end)

    # ---- sticky

    def _client_gone(self, reason: str, text: str, code: int) -> None:
        """Its client has gone, and may come back where it said that it would."""
        seconds = float(self._terms.get("sticky") or 0.0)
        if self.wish.key is None or not seconds or not self._was_live:
            self.over(reason, text, code)
            return
        self.state, self.request = "detached", None
        self._wait(seconds, lambda: self.over("detached", f"nobody came back within {seconds:g} s", code))

    def attach(self, request: Request, wish: Wish) -> Plan:
        """Its client is back."""
        self.request, self.wish = request, wish
        return self.dial()

    # ---- the end

    def end(self, reason: str, text: str, *, gone: bool = False) -> None:
        """It is to end now, whatever it is doing. One that has not begun is tried elsewhere. `gone`: there is no worker any more."""
        said = text if text.startswith("ostler: ") else f"ostler: {text}"
        code = CODES.get(reason, _LOST)
        if self.splice is not None:
            self.splice.finish(reason, said, code)
        elif self.state == "dialling" and self.request is not None:
            self.request.abandon(self._next(text, strike=False))
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
        self._wait(None)
        self._drop_ahead()
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
        self._wait(_UNUSED, lambda: self.over("unused", "the ticket was not used in time", 0))

    def used(self) -> None:
        """Its ticket was."""
        self._wait(None)

    def closed_at_door(self, reason: str, sums: dict[str, Any]) -> None:
        """A redirected session has ended."""
        self._bytes_in, self._bytes_out = int(sums.get("bytes_in", 0)), int(sums.get("bytes_out", 0))
        self.over(reason, str(sums.get("text", "")), int(sums.get("code", 0)))

    # ---- what is known of it

    def facts(self) -> list[Any]:
        splice = self.splice
        shown = {"live": "live", "redirected": "live", "detached": "detached"}.get(self.state, "opening")
        if splice is None:
            return [self._bytes_in, self._bytes_out, 0.0, shown]
        return [
            self._bytes_in + splice.bytes_in,
            self._bytes_out + splice.bytes_out,
            round(splice.idle, 1),
            shown,
        ]

    def _wait(self, seconds: float | None, then: Any = None) -> None:
        if self._clock is not None:
            self._clock.cancel()
        self._clock = None if seconds is None else asyncio.get_running_loop().call_later(seconds, then)
