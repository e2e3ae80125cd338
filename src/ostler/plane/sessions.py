"""Sessions, as the plane serves them: who may, which worker, a place in line, and what the node is told of it all.

node → plane                                            plane → node, all ["sessions", …]
["pools", {pool: terms}]                                ["admit", id, component, generation, about]
["up", pool, component, generation, endpoint]           ["ended", id, reason, {text, code, bytes_in, bytes_out}]
["close", component, generation, whether the node stops]   ["empty", component, generation]
["cut", component, generation, reason, text]            ["strike", component, generation, text]
["down", component, generation, reason, text]           ["want", name, waiting]
["admitted", id, endpoint]                              ["facts", {live, lines, lines_total, counts}]
["refused", id, code, text, seconds]
["kill", id, reason, text]   ["began", id]   ["over", id, reason, sums]   ["peers", {own, secret, peers}]
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable
from typing import Any

from ostler.plane.access import SESSIONS, Access, Refusal
from ostler.plane.plan import LATER, Plan, Reply, Serve
from ostler.plane.relay import Wish, read_wish, refuse
from ostler.plane.request import Request
from ostler.plane.session import Session
from ostler.plane.session_forwarding import SessionForwarding
from ostler.sessions.lending import Lenders
from ostler.sessions.selection import Key, Worker, matches
from ostler.sessions.slots import Group, Slots

log = logging.getLogger("ostler.plane")

PATH = SESSIONS
_TOLD = 1.0  # seconds between two reports to the node
_COMES_BACK = 2.0  # seconds that the last connection of a sticky session gets to end, when its client is back
_FORGIVEN = 0.5  # seconds, at first, until a client that finds no other worker may try one again that failed it
_SHOWN = 100  # of those who wait, so many are told one by one


class Sessions:
    """All sessions of the plane."""

    def __init__(self, say: Callable[..., None], access: Callable[[], Access | None]) -> None:
        self._send, self._access = say, access
        self._loop = asyncio.get_running_loop()
        self.time = self._loop.time
        self.slots = Slots()
        self.forwarding = SessionForwarding(self)
        self.lenders = Lenders()
        self.live: dict[str, Session] = {}  # all that hold a slot, by id
        self._in_worker: dict[Key, dict[Session, None]] = {}
        self._keys: dict[tuple[str, str, str], Session] = {}  # owner, public name, key
        self._closing: set[Key] = set()
        self._is_leaving = False
        self._wanted: dict[str, int] = {}
        self._clock: asyncio.TimerHandle | None = None
        self._due = math.inf
        self._reporting: asyncio.TimerHandle | None = None

    def say(self, *what: object) -> None:
        self._send("sessions", *what)

    # ---- what the node says

    def heard(self, frame: list[Any]) -> None:
        match frame[1:]:
            case ["pools", dict(pools)]:
                self.slots.learn(pools)
                self.slots.serve(self.time())
            case ["up", pool, component, generation, dict(endpoint)]:
                self._up(pool, component, generation, endpoint)
            case ["close", component, generation, *stops]:
                self._close((component, generation), stops=stops == [True])
            case ["cut", component, generation, reason, text]:
                self._cut((component, generation), reason, text)
            case ["down", component, generation, reason, text]:
                self._down((component, generation), reason, text)
            case ["admitted", id_, dict(endpoint)] if id_ in self.live:
                self.live[id_].admitted(endpoint)
            case ["refused", id_, code, text, seconds] if id_ in self.live:
                self.live[id_].declined(code, text, seconds)
            case ["kill", id_, reason, text] if id_ in self.live:
                self.live[id_].kill(reason, text)
            case ["began", id_] if id_ in self.live:
                self.live[id_].used()
            case ["peers", dict(told)]:
                self.forwarding.told(told)
            case ["over", id_, reason, dict(sums)] if id_ in self.live:
                self.live[id_].closed_at_door(reason, sums)
        self._look()

    def _up(self, pool: str, component: str, generation: int, told: dict[str, Any]) -> None:
        worker = Worker(
            component,
            generation,
            pool,
            slots=told["slots"],
            lifetime=told.get("lifetime") or 0,
            served=told.get("served") or 0,
            versions=tuple(told.get("versions") or ()),
            endpoint=told,
        )
        if worker.key in self.slots.workers:  # told twice: the one that is known has the slots in use
            return
        self._in_worker[worker.key] = {}
        if (group := self.slots.of(worker)) is not None:
            group.cdp = told.get("cdp") or group.cdp
        self.slots.up(worker, self.time())

    def _close(self, key: Key, *, stops: bool) -> None:
        """It takes no new sessions. `stops`: the node stops, so that nobody comes back to those that wait for that."""
        if self.slots.close(key) is not None:
            self._closing.add(key)
            for session in [*self._in_worker.get(key, ())]:
                if stops and session.state == "detached":
                    session.end("shutdown", "the node is shutting down")
            self._is_empty(key)

    def _cut(self, key: Key, reason: str, text: str, *, gone: bool = False) -> None:
        self.slots.close(key)
        for session in [*self._in_worker.get(key, ())]:
            session.end(reason, text, gone=gone)

    def _down(self, key: Key, reason: str, text: str) -> None:
        self.slots.down(key)
        self._closing.discard(key)
        self._cut(key, reason, text, gone=True)
        self._in_worker.pop(key, None)

    def _is_empty(self, key: Key) -> None:
        if key in self._closing and not self._in_worker.get(key):
            self._closing.discard(key)
            self.say("empty", *key)

    def stop(self) -> None:
        """The plane is about to leave: who waits is sent away; those who have a session keep it."""
        self._is_leaving = True
        for group in self.slots.groups.values():
            for session in group.line.order(self.slots.live):
                group.line.leave(session)
                assert isinstance(session, Session)
                if session.request is not None:
                    session.request.go(_leaving())
        self._look()

    def end_all(self, reason: str = "shutdown", text: str = "the node is shutting down") -> None:
        """The plane leaves now."""
        for session in [*self.live.values()]:
            session.end(reason, text)
        self.forwarding.end_all(reason, text)

    # ---- a client

    def asked_by_node(self, request: Request) -> Plan:
        """Another node asks for a slot."""
        access = self._access()
        if access is None or self._is_leaving:
            return _leaving()
        if why := access.refusal(request.method, request.path, request.query, request.headers, request.peer):
            return refuse(why.status, why.code, why.message)
        return self.forwarding.route(request)

    def route(self, request: Request) -> Plan:
        """What is done with a request for a session."""
        access = self._access()
        if access is None or self._is_leaving:
            return _leaving()
        caller = access.caller(request.method, request.path, request.query, request.headers, request.peer)
        if isinstance(caller, Refusal):
            return refuse(caller.status, caller.code, caller.message)
        name, slash, rest = request.path[len(PATH) :].partition("/")
        found = self.slots.group(name)
        if found is None:
            names = ", ".join(sorted(self.slots.groups)) or "none"
            return refuse(400, "UNKNOWN_POOL", f"there is no pool {name[:80]!r}; served are: {names}")
        group, pool = found
        if caller.pools and not caller.pools & {name, group.name}:
            allowed = ", ".join(sorted(caller.pools))
            return refuse(403, "FORBIDDEN_POOL", f"this token may open sessions of {allowed}, not of {name}")
        if not _is_upgrade(request, group):
            return self._plain(request, group, name, rest)
        wish = read_wish(request, name, slash + rest, caller, group, pool)
        if isinstance(wish, Reply):
            return wish
        return self._refusal(group, wish) or self._begin(request, group, wish)

    def _plain(self, request: Request, group: Group, name: str, rest: str) -> Reply:
        """A request that asks for no session: where one is to be had, as Playwright and DevTools clients ask, or what it should be."""
        host = (request.get(b"host") or b"localhost").decode("latin-1")
        query = request.query.decode("latin-1")
        scheme = "wss" if request.get(b"x-forwarded-proto") == b"https" else "ws"
        url = f"{scheme}://{host}{PATH}{name}" + (f"?{query}" if query else "")
        if request.method in ("GET", "HEAD"):
            if rest.rstrip("/") == "json/version" and self._may_be_cdp(group):
                return _json({**(group.cdp or {}), "webSocketDebuggerUrl": url})
            if rest.rstrip("/") in ("json", "json/list"):
                return _json([] if group.cdp is not None else {"wsEndpointPath": ""})
        message = f"this is where sessions of {group.name} begin: connect with WebSocket to {PATH}{name}"
        reply = refuse(426, "UPGRADE_REQUIRED", message)
        return Reply(426, {**reply.headers, "upgrade": "websocket", "connection": "upgrade"}, reply.body)

    def _may_be_cdp(self, group: Group) -> bool:
        """Known to be, or nobody can know yet: its clients are to wait for a worker in line, as all others do."""
        return group.cdp is not None or not (len(group.ready) or any(t.get("product") for t in group.pools.values()))

    def _refusal(self, group: Group, wish: Wish) -> Reply | None:
        """Why the client gets no session, whatever is free."""
        served = self._versions(group, wish.pool)
        if wish.version is not None and served and not any(matches(wish.version, own) for own in served):
            known = ", ".join(sorted(served))
            message = f"the client has version {wish.version}, and {wish.name} serves {known}: install one of these"
            return refuse(409, "VERSION", message, served=sorted(served), found=wish.version)
        caller = wish.caller
        comes_back = wish.key is not None and self.has_key(caller.owner, group, wish.key)  # to what counts already
        if caller.sessions and not comes_back and self.slots.held(caller.owner) >= caller.sessions:
            group.counts["refused"] += 1
            message = f"{caller.owner} may have {caller.sessions} sessions at once, and has them; end one first"
            return refuse(429, "TOO_MANY_SESSIONS", message, retry=5.0)
        return None

    def _versions(self, group: Group, pool: str | None) -> set[str]:
        """Versions that are served; none: all."""
        found = self.forwarding.versions(group.name)
        for name, terms in group.pools.items():
            if pool in (None, name):
                if not terms.get("versions"):
                    return set()
                found |= set(terms["versions"])
        return found

    async def _come_back(self, known: Session, request: Request, group: Group, wish: Wish) -> Plan:
        """Its client may have hung up a moment ago, and the end of that connection is still on its way."""
        until, place = self.time() + _COMES_BACK, (wish.caller.owner, group.name, wish.key or "")

        def is_taken() -> bool:
            return self._keys.get(place) is known and known.state != "detached"

        while is_taken() and self.time() < until:  # noqa: ASYNC110  seldom, and short
            await asyncio.sleep(0.02)
        if is_taken() or request.is_over:
            message = f"the session {wish.key!r} has a client already: one at a time"
            return refuse(409, "SESSION_IN_USE", message)
        return self._refusal(group, wish) or self._begin(request, group, wish)

    def _begin(self, request: Request, group: Group, wish: Wish) -> Plan:
        if wish.key is not None:
            place = (wish.caller.owner, group.name, wish.key)
            if (known := self._keys.get(place)) is not None:
                if known.state == "detached":
                    return known.attach(request, wish)
                return Serve(lambda _: self._come_back(known, request, group, wish))
            session = self._keys[place] = Session(self, request, group, wish)
            if self.forwarding.may_be_elsewhere(session):
                return self.forwarding.to_holder(session, lambda: self._start(session))
        else:
            session = Session(self, request, group, wish)
        return self._start(session)

    def _start(self, session: Session) -> Plan:
        assert session.request is not None
        if (worker := self.forwarding.kept(session.request, session)) is not None:
            session.granted(worker)
            return LATER
        plan = session.ask()
        self._look()
        return plan

    def has_key(self, owner: str, group: Group, key: str) -> bool:
        """Whether a session with that key waits here for its client."""
        known = self._keys.get((owner, group.name, key))
        return known is not None and known.state == "detached"

    # ---- what sessions say

    def waits(self, session: Session) -> None:
        """It is in line."""
        if session.excluded:
            later = self.time() + max(_FORGIVEN, self.time() - session.asked)
            self._loop.call_at(later, self.slots.forgive, session.group, session, later)
        self.forwarding.look_for(session)
        self._report_soon()
        self._look()  # it may have waited for long enough already, somewhere else

    def leaves(self, session: Session) -> None:
        """It is not any more: its client has gone."""
        self.slots.leave(session.group, session)
        self.forget(session)
        self._look()

    def holds(self, session: Session) -> None:
        """It has a slot."""
        assert session.worker is not None
        self.live[session.id] = session
        self._in_worker.setdefault(session.worker.key, {})[session] = None
        self._report_soon()

    def began(self, session: Session) -> None:
        """Bytes go through."""
        if session.worker is not None:
            self.slots.praise(session.worker)

    def strike(self, worker: Worker, reason: str) -> None:
        log.warning("no connection to %s (generation %d): %s", worker.component, worker.generation, reason)
        self.slots.strike(worker)
        self.say("strike", worker.component, worker.generation, reason)

    def lets_go(self, session: Session) -> None:
        """It does not need its slot any more; `freed` follows."""
        self.live.pop(session.id, None)
        if session.worker is not None:
            self._in_worker.get(session.worker.key, {}).pop(session, None)

    def freed(self, worker: Worker, owner: str) -> None:
        self.slots.done(worker, owner, self.time())
        self._is_empty(worker.key)
        self._report_soon()
        self._look()

    def forget(self, session: Session) -> None:
        """It is over, or never began."""
        if session.wish.key is not None:
            place = (session.owner, session.group.name, session.wish.key)
            if self._keys.get(place) is session:
                del self._keys[place]

    # ---- the clock

    def _look(self) -> None:
        """Look at those who wait when the first of them has waited for too long; tell the node how many there are."""
        due = self.slots.tick(self.time())
        for name, group in self.slots.groups.items():
            if self._wanted.get(name, 0) != len(group.line):
                self._wanted[name] = len(group.line)
                self.say("want", name, len(group.line))
        if due != self._due or self._clock is None:
            if self._clock is not None:
                self._clock.cancel()
            self._due = due
            self._clock = None if due == math.inf else self._loop.call_at(due, self._look_again)

    def _look_again(self) -> None:
        self._clock = None
        self._look()

    def _report_soon(self) -> None:
        if self._reporting is None:
            self._reporting = self._loop.call_later(_TOLD, self.report)

    def report(self) -> None:
        """Tell the node how it is: every second while there is anything, and once more when there is nothing."""
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        if not self.slots.groups:  # the app has no sessions
            return
        now = self.time()
        groups = {name: group for name, group in self.slots.groups.items() if group.counts or len(group.line)}
        lines = {
            name: [[t.owner, t.priority, round(now - t.asked, 1)] for t in group.line.order(self.slots.live)[:_SHOWN]]
            for name, group in groups.items()
            if len(group.line)
        }
        told = {
            "live": {session.id: session.facts() for session in self.live.values()},
            "lines": lines,
            "lines_total": {name: len(groups[name].line) for name in lines},
            "counts": {name: self._counts(group) for name, group in groups.items()},
        }
        self.say("facts", told)
        if self.live or lines:
            self._report_soon()

    def _counts(self, group: Group) -> dict[str, int]:
        counts = dict.fromkeys(("admitted", "refused", "left", "expired", "bytes_in", "bytes_out"), 0) | group.counts
        for session in self.live.values():
            if session.group is group:
                bytes_in, bytes_out, *_ = session.facts()
                counts["bytes_in"] += bytes_in
                counts["bytes_out"] += bytes_out
        return counts


def _is_upgrade(request: Request, group: Group) -> bool:
    """Whether it asks for a protocol in which it can have a session."""
    if request.method != "GET":
        return False
    if any(terms.get("protocol") == "tcp" for terms in group.pools.values()):
        return request.protocol == b"tcp" or (request.upgrades and bool(request.get(b"sec-websocket-key")))
    return request.upgrades


def _leaving() -> Reply:
    return refuse(503, "NO_WORKER", "the node is starting or stopping; try again", retry=1.0)


def _json(value: object) -> Reply:
    return Reply(200, {"content-type": "application/json; charset=utf-8"}, json.dumps(value).encode())
