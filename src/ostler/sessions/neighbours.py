"""Sessions on many nodes: where the others have free slots goes to the data plane, and what they ask of this node's sessions is done."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ostler.errors import OstlerError
from ostler.parts import Tasks
from ostler.sessions.registry import Registered

if TYPE_CHECKING:
    from ostler.lifecycle.membership import Membership
    from ostler.sessions.pools import SessionPools

log = logging.getLogger("ostler.sessions")

_LOOK = 1.0  # seconds between two looks at the others


class Neighbours:
    """A part of the node, where the registry has many. Its data is at most a second old, so a node that is asked may refuse."""

    def __init__(self, pools: SessionPools, member: Membership, secret: str, adopt: Callable[[str], None]) -> None:
        self._pools, self._member, self._secret, self._adopt = pools, member, secret, adopt
        self.elsewhere: list[Registered] = []
        """The workers of the other living nodes, as the registry has them."""
        self._told: Any = None
        self._news = asyncio.Event()
        self._is_deaf = False
        self._swept = time.monotonic()
        self._tasks = Tasks()

    async def start(self) -> None:
        self._tasks.begin(self._run(), "session neighbours")

    async def stop(self) -> None:
        await self._tasks.stop()

    async def live(self) -> list[dict[str, Any]]:
        """Sessions of the other nodes, newest first, in the form of `store.sessions.list`."""
        own = self._member.id
        return [row for row in await self._pools.registry.live() if row["node"] != own]

    def workers(self) -> list[dict[str, Any]]:
        """Session workers of the other nodes."""
        return [{**worker._asdict(), "free": worker.free} for worker in self.elsewhere]

    def forget(self) -> None:
        """A new plane knows nothing yet."""
        self._told = None
        self._news.set()

    def look_soon(self) -> None:
        """There may be news."""
        self._news.set()

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
                self._is_deaf = False
            except OstlerError as error:
                if not self._is_deaf:
                    log.warning("where other nodes have free slots cannot be read now: %s", error)
                self._is_deaf = True
            except Exception:
                log.exception("the other nodes' sessions could not be looked at; it goes on")
            try:
                async with asyncio.timeout(_LOOK):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()

    async def _look(self) -> None:
        registry, now = self._pools.registry, time.monotonic()
        for session in await registry.orders():
            self._pools.kill(session, "an operator on another node")
        if (secret := await registry.secret(self._secret)) != self._secret:
            self._secret = secret
            self._adopt(secret)
        own = self._member.id
        self.elsewhere = [worker for worker in await registry.workers() if worker.node != own]
        self._tell(own)
        if now >= self._swept + registry.sweep_every:
            self._swept = now
            await registry.sweep()

    def _tell(self, own: str) -> None:
        peers: dict[str, dict[str, Any]] = {}
        for worker in self.elsewhere:
            if not worker.url:
                continue
            peer = peers.setdefault(worker.node, {"url": worker.url, "pools": {}})
            pool = peer["pools"].setdefault(worker.serves, {"free": 0, "versions": []})
            pool["free"] += worker.free
            pool["versions"] = sorted({*pool["versions"], *worker.versions})
        told = {"own": own, "secret": self._secret, "peers": peers}
        # Again each time, though nothing changed: the plane takes what it has asked for off the figures.
        if (peers or told != self._told) and self._pools.say("peers", told):
            self._told = told
