"""Calls that another node can take at once, or has room for: a place is asked for first, then the body goes there.

What was passed on by a node is never passed on again. A node that refuses or cannot be reached costs a moment, and no call.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ostler.calls.placing import There, Way, choose
from ostler.plane.access import BY
from ostler.plane.exchange import OWN
from ostler.plane.leases import Key, Place
from ostler.plane.nodes import Nodes, keeps
from ostler.plane.plan import LATER, Forward, Plan, Refuse
from ostler.plane.request import Request
from ostler.plane.upstream import Upstream

if TYPE_CHECKING:
    from ostler.plane.call import Call
    from ostler.plane.calls import Calls

LEASE = b"x-ostler-lease"
INNER = "/api/v1/inner/places/"
_KEPT = 5.0  # seconds for which a place is kept for the call that asked for it
_NOT_FOR_NODES = OWN | {b"authorization", b"cookie", b"host", b"expect", b"x-request-id", b"x-ostler-timeout"}
_NOT_FOR_NODES |= {b"x-ostler-model", BY, LEASE}


class Forwarding:
    """The plane's part for other nodes: asks them, and answers them."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._nodes = Nodes()
        self._here: dict[str, There] = {}
        self._peers: dict[str, dict[str, There]] = {}
        self._kept: dict[str, tuple[Key, Place, asyncio.TimerHandle]] = {}

    @property
    def peers(self) -> bool:
        """Whether there are other nodes."""
        return bool(self._nodes.upstreams)

    def told(self, told: dict[str, Any]) -> None:
        """What the nodes say of their models."""
        self._nodes.told(told)
        self._here = {name: There(*values) for name, values in told["here"].items()}
        self._peers = {n: {m: There(*v) for m, v in p["models"].items()} for n, p in told["peers"].items()}

    # ---- asking others

    def ways(self, request: Request, key: Key) -> list[Way]:
        """Nodes that may have a place for the call; none: it stays here."""
        if not self.peers or request.get(BY) is not None:
            return []
        name, peers = "\n".join(key), self._peers.items()
        elsewhere = {node: has[name] for node, has in peers if name in has and self._nodes.may_be_asked(node)}
        return choose(self._here.get(name, There("IDLE")), elsewhere) if elsewhere else []

    async def elsewhere(self, call: Call, ways: list[Way], stay: Callable[[], Plan]) -> Plan:
        """Pass the call on to the first that has a place for it; `stay` where none has."""
        for way in ways:
            upstream = self._nodes.upstreams.get(way.node)
            if upstream is not None and (lease := await self._place(call, way)) is not None:
                return self._pass_on(call, way, upstream, lease, stay)
        return stay() or LATER

    async def _place(self, call: Call, way: Way) -> str | None:
        task, model = call.key
        path = f"{INNER}{quote(task, safe='')}?model={quote(model, safe='')}&starts={int(way.starts)}"
        return await self._nodes.lease(way.node, path, f"a place for {task} {model!r}")

    def _pass_on(self, call: Call, way: Way, upstream: Upstream, lease: str, stay: Callable[[], Plan]) -> Plan:
        request, loop = call.request, asyncio.get_running_loop()
        secret, own = self._nodes.secret.encode(), self._nodes.own.encode()
        head = [request.method.encode(), b" ", request.target, b" HTTP/1.1\r\nhost: localhost\r\n"]
        head += [b"authorization: Bearer ", secret, b"\r\n", BY, b": ", own, b"\r\nx-request-id: ", call.id]
        head += [b"\r\nx-ostler-timeout: %.3f\r\nx-ostler-model: " % max(0.001, call.deadline - loop.time())]
        head += [call.key[1].encode(), b"\r\n"]
        if lease:
            head += [LEASE, b": ", lease.encode(), b"\r\n"]
        for name, value in request.headers:
            if name not in _NOT_FOR_NODES:
                head += [name, b": ", value, b"\r\n"]

        def failed(_: Request, reason: str, sent: bool) -> Plan:
            self._nodes.avoid(way.node, reason)
            if not sent:
                return stay() or LATER
            message = f"node {way.node} was lost during the call ({reason})"
            return Refuse(502, "NODE_LOST", message, {"x-ostler-request-id": call.id.decode("latin-1")})

        return Forward(upstream, b"".join(head), failed=failed, max_body=self._calls.max_body)

    # ---- answering others

    def route(self, request: Request, task: str, model: str, *, starts: bool) -> Plan:
        """Another node asks for a place: one that is free is kept for it; `starts`: its call may also wait here."""
        known = self._calls.tasks.get(task)
        if known is None or (model not in known.models and not known.any_model):
            return Refuse(404, "UNKNOWN_MODEL", f"this node has no {task} {model[:80]!r}")
        key = (task, model)
        loop = asyncio.get_running_loop()
        takes_turns = self._calls.takes_turns(key)  # its call waits for its turn here, as any other
        place = None if takes_turns else self._calls.leases.reserve(key, loop.time())
        if place is not None:
            lease = secrets.token_hex(8)
            self._kept[lease] = (key, place, loop.call_later(_KEPT, self._expire, lease))
            return keeps(lease)
        if (starts or takes_turns) and self._calls.leases.could_wait(key):
            return keeps("")
        return Refuse(409, "NO_PLACE", f"{task} {model[:80]!r} has no free place here")

    def _expire(self, lease: str) -> None:
        if (kept := self._kept.pop(lease, None)) is not None:
            self._calls.leases.done(kept[1], asyncio.get_running_loop().time())

    def kept(self, request: Request, key: Key) -> Place | None:
        """The place that was kept for this call."""
        lease = request.get(LEASE)
        if lease is None or request.get(BY) is None:
            return None
        found = self._kept.get(lease.decode("latin-1"))
        if found is None or found[0] != key:
            return None
        del self._kept[lease.decode("latin-1")]
        found[2].cancel()
        return found[1]
