"""Who follows what workers and jobs print: woken when something was printed, to read the log from where they were."""

from __future__ import annotations

import asyncio
from typing import Any

from ostler.events import Bus, Printed


class Tails:
    """Who follows what."""

    def __init__(self, bus: Bus) -> None:
        self._followers: dict[str, set[asyncio.Event]] = {}
        self.closed = False
        bus.listen(self._heard)

    def _heard(self, event: Any) -> None:
        if isinstance(event, Printed):
            for follower in self._followers.get(event.subject, ()):
                follower.set()

    def follow(self, subject: str) -> asyncio.Event:
        """An event that is set whenever the subject has printed."""
        wake = asyncio.Event()
        self._followers.setdefault(subject, set()).add(wake)
        return wake

    def leave(self, subject: str, wake: asyncio.Event) -> None:
        followers = self._followers.get(subject, set())
        followers.discard(wake)
        if not followers:
            self._followers.pop(subject, None)

    async def start(self) -> None:
        """Nothing to begin: followers come by themselves."""

    async def stop(self) -> None:
        """End all of them: the node stops."""
        self.closed = True
        for followers in self._followers.values():
            for wake in followers:
                wake.set()
