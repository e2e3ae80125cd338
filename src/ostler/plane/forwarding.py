"""Calls that another node can take at once, or has room for: a place is asked for first, then the body goes there.

What was passed on by a node is never passed on again. A node that refuses or cannot be reached costs a moment, and no call.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from ostler.calls.placing import There, Way, choose
from ostler.plane.access import BY
from ostler.plane.ask import BadUpstream, ask
from ostler.plane.exchange import OWN
from ostler.plane.leases import Key, Place
from ostler.plane.plan import LATER, Forward, Plan, Refuse, Reply
from ostler.plane.request import Request
from ostler.plane.upstream import Upstream

if TYPE_CHECKING:
    from ostler.plane.call import Call
    from ostler.plane.calls import Calls

log = logging.getLogger("ostler.plane")

LEASE = b"x-ostler-lease"
INNER = "/api/v1/inner/places/"
_PATIENCE = 2.0  # seconds that a node gets to say whether it has a place
_KEPT = 5.0  # seconds for which a place is kept for the call that asked for it
_AVOIDED = 3.0  # seconds for which a node that could not be reached is not asked
_NOT_FOR_NODES = OWN | {
    b"authorization",
    b"cookie",
    b"host",
    b"expect",
    BY,
    LEASE,
    b"x-request-id",
    b"x-ostler-timeout",
}


class Forwarding:
    """The plane's part for other nodes: asks them, and answers them."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._own, self._secret = "", ""
        self._here: dict[str, There] = {}
        self._peers: dict[str, dict[str, There]] = {}
        self._upstreams: dict[str, Upstream] = {}
        self._avoided: dict[str, float] = {}
        self._kept: dict[str, tuple[Key, Place, asyncio.TimerHandle]] = {}

    @property
    def peers(self) -> bool:
        """Whether there are other nodes."""
        return bool(self._upstreams)

    def told(self, told: dict[str, Any]) -> None:
        """What the nodes say of their models."""
        self._own, self._secret = told["own"], told["secret"]
        self._here = {name: There(*values) for name, values in told["here"].items()}
        self._peers = {n: {m: There(*v) for m, v in p["models"].items()} for n, p in told["peers"].items()}
        addresses = {node: address(peer["url"]) for node, peer in told["peers"].items()}
        for node in [n for n, u in self._upstreams.items() if u.path != addresses.get(n)]:
            self._upstreams.pop(node).close()
        for node, where in addresses.items():
            if where is not None and node not in self._upstreams:
                self._upstreams[node] = Upstream(where)

    # ---- asking others

    def ways(self, request: Request, key: Key) -> list[Way]:
        """Nodes that may have a place for the call; none: it stays here."""
        if not self._upstreams or request.get(BY) is not None:
            return []
        name, now = "\n".join(key), asyncio.get_running_loop().time()
        elsewhere = {
            node: models[name]
            for node, models in self._peers.items()
            if name in models and node in self._upstreams and self._avoided.get(node, 0.0) <= now
        }
        return choose(self._here.get(name, There("IDLE")), elsewhere) if elsewhere else []

    async def elsewhere(self, call: Call, ways: list[Way], stay: Callable[[], Plan]) -> Plan:
        """Pass the call on to the first that has a place for it; `stay` where none has."""
        for way in ways:
            upstream = self._upstreams.get(way.node)
            if upstream is not None and (lease := await self._place(call, way, upstream)) is not None:
                return self._pass_on(call, way, upstream, lease, stay)
        return stay() or LATER

    async def _place(self, call: Call, way: Way, upstream: Upstream) -> str | None:
        task, model = call.key
        path = f"{INNER}{quote(task, safe='')}?model={quote(model, safe='')}&starts={int(way.starts)}"
        headers = {"authorization": f"Bearer {self._secret}", BY.decode(): self._own}
        try:
            async with asyncio.timeout(_PATIENCE):
                async with await ask(upstream, "GET", path, headers) as answer:
                    if answer.status != 200:
                        return None
                    return str(json.loads(await answer.read(10_000))["lease"])
        except (BadUpstream, TimeoutError, ValueError, KeyError, TypeError) as error:
            self._avoided[way.node] = asyncio.get_running_loop().time() + _AVOIDED
            log.info("node %s does not say whether it has a place for %s %r: %s", way.node, task, model, error)
            return None

    def _pass_on(self, call: Call, way: Way, upstream: Upstream, lease: str, stay: Callable[[], Plan]) -> Plan:
        request = call.request
        loop = asyncio.get_running_loop()
        head = [
            request.method.encode(),
            b" ",
            request.target,
            b" HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer ",
        ]
        head += [self._secret.encode(), b"\r\n", BY, b": ", self._own.encode(), b"\r\nx-request-id: ", call.id]
        head += [b"\r\nx-ostler-timeout: %.3f\r\nx-ostler-model: " % max(0.001, call.deadline - loop.time())]
        head += [call.key[1].encode(), b"\r\n"]
        if lease:
            head += [LEASE, b": ", lease.encode(), b"\r\n"]
        for name, value in request.headers:
            if name not in _NOT_FOR_NODES and name != b"x-ostler-model":
                head += [name, b": ", value, b"\r\n"]

        def failed(_: Request, reason: str, sent: bool) -> Plan:
            self._avoided[way.node] = loop.time() + _AVOIDED
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
            return _json({"lease": lease})
        if (starts or takes_turns) and self._calls.leases.could_wait(key):
            return _json({"lease": ""})
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


def _json(value: object) -> Reply:
    return Reply(200, {"content-type": "application/json"}, json.dumps(value).encode())


def address(url: str) -> str | None:
    """Where a node's plane listens; None for an address that is not plain HTTP."""
    parts = urlsplit(url)
    return f"tcp:{parts.hostname}:{parts.port or 80}" if parts.scheme == "http" and parts.hostname else None
