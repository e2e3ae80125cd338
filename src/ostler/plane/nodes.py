"""The other nodes as the plane reaches them: where they listen, and what they answer when they are asked for room."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any
from urllib.parse import urlsplit

from ostler.plane.access import BY
from ostler.plane.ask import BadUpstream, ask
from ostler.plane.plan import Reply
from ostler.plane.upstream import Upstream

log = logging.getLogger("ostler.plane")

_PATIENCE = 2.0  # seconds that a node gets to say whether it has room
_AVOIDED = 3.0  # seconds for which a node that could not be reached is not asked


class Nodes:
    """Those that have an address for others, by their id."""

    def __init__(self) -> None:
        self.own, self.secret = "", ""
        self.upstreams: dict[str, Upstream] = {}
        self._avoided: dict[str, float] = {}

    def told(self, told: dict[str, Any]) -> None:
        """Who there is now."""
        self.own, self.secret = told["own"], told["secret"]
        addresses = {node: _address(peer["url"]) for node, peer in told["peers"].items()}
        for node in [n for n, u in self.upstreams.items() if u.path != addresses.get(n)]:
            self.upstreams.pop(node).close()
        for node, where in addresses.items():
            if where is not None and node not in self.upstreams:
                self.upstreams[node] = Upstream(where)

    def may_be_asked(self, node: str) -> bool:
        return node in self.upstreams and self._avoided.get(node, 0.0) <= asyncio.get_running_loop().time()

    def avoid(self, node: str, why: str) -> None:
        """It cannot be reached, or makes no sense."""
        self._avoided[node] = asyncio.get_running_loop().time() + _AVOIDED
        log.info("node %s is not asked for %g s: %s", node, _AVOIDED, why)

    async def lease(self, node: str, path: str, what: str) -> str | None:
        """The name of what the node keeps for whoever asks; None where it has nothing, or does not say."""
        headers = {"authorization": f"Bearer {self.secret}", BY.decode(): self.own}
        if (upstream := self.upstreams.get(node)) is None:
            return None
        try:
            async with asyncio.timeout(_PATIENCE):
                async with await ask(upstream, "GET", path, headers) as answer:
                    return str(json.loads(await answer.read(10_000))["lease"]) if answer.status == 200 else None
        except (BadUpstream, TimeoutError, ValueError, KeyError, TypeError) as error:
            self.avoid(node, f"it does not say whether it has {what}: {error}")
            return None


def keeps(lease: str) -> Reply:
    """The answer to a node that asked."""
    return Reply(200, {"content-type": "application/json"}, json.dumps({"lease": lease}).encode())


def _address(url: str) -> str | None:
    """Where a node's plane listens; None for an address that is not plain HTTP."""
    parts = urlsplit(url)
    return f"tcp:{parts.hostname}:{parts.port or 80}" if parts.scheme == "http" and parts.hostname else None
