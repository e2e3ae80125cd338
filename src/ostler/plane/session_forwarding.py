"""Sessions of clients that came to a node without a free slot: another node is asked for one, and the client is relayed there.

The other node's plane relays it to the worker, writes its row and keeps its limits; this one passes bytes. What came through a node
is never passed on again. A client waits in its own node's line, and is tried elsewhere when another node has a free slot.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, quote, unquote, urlencode

from ostler import tcp
from ostler.plane.answer import Head, switching
from ostler.plane.nodes import Nodes, keeps
from ostler.plane.plan import LATER, Plan, Refuse, Relay
from ostler.plane.relay import LEASE
from ostler.plane.request import Request
from ostler.plane.upstream import Link
from ostler.sessions.selection import Worker, matches
from ostler.sessions.splice import Limits, Splice

if TYPE_CHECKING:
    from ostler.plane.session import Session
    from ostler.plane.sessions import Sessions

log = logging.getLogger("ostler.plane")

T = TypeVar("T")

INNER = "/api/v1/inner/sessions/"
_KEPT = 3.0  # seconds for which a slot is kept for the client that is on its way
# A node that vanishes without a word (no power, no network) is given up after 30 s: asked after 15, then every 5.
_KEEP_ALIVE = (15.0, 5.0, 3, 30.0)  # seconds: the other node's own pings come from the other side, and end with it
_HANDSHAKE = 30.0  # seconds that another node gets to connect the client


class _Asked(NamedTuple):
    """For whom another node asks: a ticket that never waits."""

    owner: str
    version: str | None
    pool: str | None
    excluded: frozenset[Any] = frozenset()


class SessionForwarding:
    """The plane's part for other nodes: asks them, and answers them."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._nodes = Nodes()
        self._peers: dict[str, dict[str, dict[str, Any]]] = {}  # by node and public name
        self._kept: dict[str, tuple[Worker, str, asyncio.TimerHandle]] = {}
        self._trying: dict[Session, asyncio.Task[None]] = {}
        self._away: dict[Splice, None] = {}

    def told(self, told: dict[str, Any]) -> None:
        """What the other nodes have."""
        self._nodes.told(told)
        self._peers = {node: peer["pools"] for node, peer in told["peers"].items()}
        for group in self._sessions.slots.groups.values():
            for session in group.line.order(self._sessions.slots.live)[: self._free(group.name)]:
                self.look_for(session)  # type: ignore[arg-type]

    def _free(self, name: str) -> int:
        """Slots that other nodes have, as far as they said."""
        return sum(max(0, pools[name]["free"]) for pools in self._peers.values() if name in pools)

    def versions(self, name: str) -> set[str]:
        """That other nodes serve."""
        return {v for pools in self._peers.values() for v in (pools.get(name) or {}).get("versions") or ()}

    def end_all(self, reason: str, text: str) -> None:
        for splice in [*self._away]:
            splice.finish(reason, f"ostler: {text}", 1001 if reason == "shutdown" else 1011)

    # ---- asking others

    def _ways(self, session: Session) -> list[str]:
        """Nodes that may have a slot for it, the one with the most first."""
        if session.wish.caller.via is not None:
            return []
        found = []
        for node, pools in self._peers.items():
            pool = pools.get(session.group.name)
            if not pool or pool["free"] <= 0 or not self._nodes.may_be_asked(node):
                continue
            served = pool.get("versions")
            if session.version is None or not served or any(matches(session.version, own) for own in served):
                found.append((-pool["free"], node))
        return [node for _, node in sorted(found)]

    def or_else(self, session: Session, stay: Callable[[], Plan]) -> Plan:
        """A slot elsewhere for one that cannot wait here; `stay` says what is done where there is none."""
        ways = self._ways(session)
        if not ways:
            return stay()

        def then(found: tuple[str, str] | None) -> Plan:
            return stay() if found is None else self._pass_on(session, *found, stay)

        return self._meanwhile(session, self._first(session, ways), then)

    def _meanwhile(self, session: Session, asking: Coroutine[Any, Any, T], then: Callable[[T | None], Plan]) -> Plan:
        """Others are asked, and what is done `then` depends on them. Until then it is in no line and has no slot, but counts for its
        owner; of a client that leaves nothing is left.
        """
        request, slots, sessions = session.request, self._sessions.slots, self._sessions
        assert request is not None
        slots.count(session.owner)
        task = asyncio.get_running_loop().create_task(asking)

        def left(_: Request) -> None:
            task.cancel()

        request.gone = left

        def answered(_: object) -> None:
            slots.forget(session.owner)
            if task.cancelled() or request.is_over:
                sessions.forget(session)
                return
            if error := task.exception():
                log.error("other nodes could not be asked for a session", exc_info=error)
            request.gone = None
            request.go(then(None if error else task.result()))

        task.add_done_callback(answered)
        return LATER

    def look_for(self, session: Session) -> None:
        """It waits in line here: try it where somebody else has a free slot, but no more clients than there are such slots."""
        trying = sum(other.group is session.group for other in self._trying)
        if session in self._trying or trying >= self._free(session.group.name):
            return
        if ways := self._ways(session):
            task = asyncio.get_running_loop().create_task(self._try(session, ways))
            self._trying[session] = task
            task.add_done_callback(lambda _: self._trying.pop(session, None))

    async def _try(self, session: Session, ways: list[str]) -> None:
        found = await self._first(session, ways)
        # It may have got a slot here meanwhile, or have left; then the other one's is free again in a moment.
        if found is not None and session.request is not None and self._sessions.slots.leave(session.group, session):
            session.request.gone = None
            session.request.go(self._pass_on(session, *found, session.ask))

    async def _first(self, session: Session, ways: list[str]) -> tuple[str, str] | None:
        """The first node that keeps a slot for it, and the slot's name there."""
        wish = session.wish
        asked = {"owner": session.owner, "pool": wish.pool or "", "version": session.version or ""}
        for node in ways:
            lease = await self._ask(node, session.group.name, asked)
            if lease is not None:
                if pool := self._peers.get(node, {}).get(session.group.name):
                    pool["free"] -= 1  # until it says how many there are
                return node, lease
        return None

    def may_be_elsewhere(self, session: Session) -> bool:
        """Whether another node may have kept the session that this client comes back to."""
        if not self._nodes.upstreams or session.wish.caller.via is not None:
            return False
        return any(terms.get("sticky") for terms in session.group.pools.values())

    def to_holder(self, session: Session, stay: Callable[[], Plan]) -> Plan:
        """Back to the node that has kept its session; `stay` where none has."""

        def then(node: str | None) -> Plan:
            return stay() if node is None else self._pass_on(session, node, "", stay)

        return self._meanwhile(session, self._holder(session), then)

    async def _holder(self, session: Session) -> str | None:
        asked = {"owner": session.owner, "key": session.wish.key or ""}
        nodes = [*self._nodes.upstreams]
        answers = await asyncio.gather(*(self._ask(node, session.group.name, asked) for node in nodes))
        return next((node for node, answer in zip(nodes, answers, strict=True) if answer is not None), None)

    async def _ask(self, node: str, name: str, asked: dict[str, str]) -> str | None:
        return await self._nodes.lease(node, f"{INNER}{quote(name, safe='')}?{urlencode(asked)}", f"a slot of {name}")

    # ---- passing on

    def _pass_on(self, session: Session, node: str, lease: str, stay: Callable[[], Plan]) -> Plan:
        request, upstream = session.request, self._nodes.upstreams.get(node)
        if request is None or upstream is None:
            return stay()
        session.state, request.upgrades = "away", True
        slots = self._sessions.slots
        slots.count(session.owner)  # until the other node has said no, or it is over there
        clock = asyncio.get_running_loop().call_later(_HANDSHAKE, lambda: request.abandon(failed("it took too long")))

        def failed(reason: str) -> Plan:
            clock.cancel()
            slots.forget(session.owner)
            self._nodes.avoid(node, reason)
            return stay() or LATER

        def declined(_: Request, head: Head) -> Plan:
            return failed(f"it answered {head.status}") if head.status in (429, 503) else None

        def ended(_: Request, how: str) -> None:
            if how != "late":
                clock.cancel()
                slots.forget(session.owner)
                self._sessions.forget(session)

        def switched(request: Request, head: Head, link: Link, rest: bytes) -> None:
            clock.cancel()
            self._join(session, node, request, switching(head), link, rest)

        return Relay(
            upstream,
            session.wish.passed_on(request, self._nodes.secret, self._nodes.own, lease),
            failed=lambda _, reason, __: failed(reason),
            ended=ended,
            switched=switched,
            declined=declined,
        )

    def _join(self, session: Session, node: str, request: Request, head: bytes, link: Link, rest: bytes) -> None:
        """The other node's plane keeps the limits and pings the client: this one passes bytes."""
        sessions = self._sessions

        def over(splice: Splice) -> None:
            del self._away[splice]
            sessions.slots.forget(session.owner)

        session.request = None
        client, after = request.hand_over()
        there = link.hand_over()
        tcp.keep_alive(there, *_KEEP_ALIVE)
        is_websocket, far = request.protocol == b"websocket", f"node {node}"
        splice = Splice(client.transport, there, Limits(), over, client.gone, websocket=is_websocket, far=far)
        self._away[splice] = None
        sessions.forget(session)
        client.write(head)
        splice.start(to_client=rest, to_worker=after)

    # ---- answering others

    def route(self, request: Request) -> Plan:
        """Another node asks: for a slot, which is kept for a moment, or whether a session with that key is here."""
        given = {name: values[0] for name, values in parse_qs(request.query.decode("latin-1")).items()}
        slots, name = self._sessions.slots, unquote(request.path[len(INNER) :])
        found = slots.group(name)
        if found is None:
            return Refuse(404, "UNKNOWN_POOL", f"this node has no pool {name[:80]!r}")
        group, owner = found[0], given.get("owner", "")
        if "key" in given:
            if self._sessions.has_key(owner, group, given["key"]):
                return keeps("")
            return Refuse(404, "NO_SESSION", "no session with that key waits here")
        wanted = _Asked(owner, given.get("version"), given.get("pool"))
        worker = slots.reserve(group, wanted)
        if worker is None:
            return Refuse(409, "NO_SLOT", f"{name[:80]!r} has no free slot here")
        lease = secrets.token_hex(8)
        clock = asyncio.get_running_loop().call_later(_KEPT, self._expire, lease)
        self._kept[lease] = (worker, owner, clock)
        return keeps(lease)

    def _expire(self, lease: str) -> None:
        if (kept := self._kept.pop(lease, None)) is not None:
            kept[2].cancel()
            self._sessions.slots.undone(kept[0])
            self._sessions.freed(kept[0], kept[1])

    def kept(self, request: Request, session: Session) -> Worker | None:
        """The slot that was kept for this client; it is the client's now."""
        given = request.get(LEASE)
        if given is None or session.wish.caller.via is None:
            return None
        lease = given.decode("latin-1")
        kept = self._kept.get(lease)
        if kept is None:
            return None
        worker, owner, clock = kept
        if owner != session.owner or not worker.is_open or self._sessions.slots.of(worker) is not session.group:
            self._expire(lease)
            return None
        del self._kept[lease]
        clock.cancel()
        return worker
