"""Turns with the registry: admissions and ends of sessions, as many as have gathered while the last turn was written.

An admission has a turn at once, because a client waits for it. Nobody waits for the record of an end: ends are written together a
moment later, or with an admission that needs the room. The slot itself is free already, in the plane.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

from ostler.errors import OstlerError
from ostler.sessions.held import Live, Serving
from ostler.sessions.registry import Ended, Registry, Verdict

log = logging.getLogger("ostler.sessions")

_GATHER = 0.02  # seconds in which ends gather
_LATER = 2.0  # seconds after which a client may try again when the registry failed


class Turns:
    """What waits for the registry. Each admission is `judged`, or refused if the turn failed."""

    def __init__(
        self,
        registry: Registry,
        judged: Callable[[Live, Verdict], None],
        refuse: Callable[[Live, str, str, float], None],
    ) -> None:
        self._registry, self._judged, self._refuse = registry, judged, refuse
        self._ended: list[Ended] = []
        self._ended_in: Counter[Serving] = Counter()
        self._wanted: list[Live] = []
        self._news = asyncio.Event()
        self._clock: asyncio.TimerHandle | None = None
        self._is_due = False  # the ends have gathered for long enough

    def admit(self, live: Live) -> None:
        self._wanted.append(live)
        self._news.set()

    def withdraw(self, live: Live) -> bool:
        """It is over before the registry was asked. False: it was asked, and may have a row."""
        waits = live in self._wanted
        if waits:
            self._wanted.remove(live)
        return waits

    def end(self, live: Live, ended: Ended) -> None:
        self._ended.append(ended)
        self._ended_in[live.serving] += 1
        if self._clock is None:
            self._clock = asyncio.get_running_loop().call_later(_GATHER, self._end_now)

    def _end_now(self) -> None:
        self._is_due = True
        self._news.set()

    def ends(self, session: str) -> bool:
        """Whether its end is still to be written."""
        return any(session == one.id for one in self._ended)

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            wanted, self._wanted = self._wanted, []
            ended = self._take_ends() if self._is_due or any(map(self._needs_room, wanted)) else []
            try:
                verdicts = await self._registry.turn(ended, [live.admission() for live in wanted])
            except OstlerError as error:
                log.warning("the registry of sessions: %s", error)
                self._refuse_all(wanted, str(error))
            except Exception:
                log.exception("a turn of sessions failed; it goes on")
                self._refuse_all(wanted, "the registry of sessions failed; the node's log has the details")
            else:
                for live, verdict in zip(wanted, verdicts, strict=True):
                    self._judged(live, verdict)

    def _needs_room(self, live: Live) -> bool:
        """Whether the registry would find its worker full, because it does not know of all ends."""
        serving = live.serving
        return len(serving.live) + self._ended_in[serving] > serving.spec.options.slots

    def _take_ends(self) -> list[Ended]:
        if self._clock is not None:
            self._clock.cancel()
        self._clock, self._is_due = None, False
        self._ended_in.clear()
        ended, self._ended = self._ended, []
        return ended

    def _refuse_all(self, wanted: list[Live], text: str) -> None:
        for live in wanted:
            self._refuse(live, "registry", text, _LATER)

    async def finish(self) -> None:
        """Write the ends that are left: the node stops, or a worker leaves, with which all sessions end that are still in the registry."""
        if ended := self._take_ends():
            await self._registry.turn(ended, [])
