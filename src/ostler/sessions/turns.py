"""Turns with the registry: ends and admissions of sessions go to it together, as many as have gathered while the last turn was written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ostler.errors import OstlerError
from ostler.sessions.held import Live
from ostler.sessions.registry import Ended, Registry, Verdict

log = logging.getLogger("ostler.sessions")

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
        self._wanted: list[Live] = []
        self._news = asyncio.Event()

    def admit(self, live: Live) -> None:
        self._wanted.append(live)
        self._news.set()

    def withdraw(self, live: Live) -> bool:
        """It is over before the registry was asked. False: it was asked, and may have a row."""
        waits = live in self._wanted
        if waits:
            self._wanted.remove(live)
        return waits

    def end(self, ended: Ended) -> None:
        self._ended.append(ended)
        self._news.set()

    def ends(self, session: str) -> bool:
        """Whether its end is still to be written."""
        return any(session == one.id for one in self._ended)

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            ended, self._ended = self._ended, []
            wanted, self._wanted = self._wanted, []
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

    def _refuse_all(self, wanted: list[Live], text: str) -> None:
        for live in wanted:
            self._refuse(live, "registry", text, _LATER)

    async def finish(self) -> None:
        """The node stops: the ends that are left are written."""
        if self._ended:
            ended, self._ended = self._ended, []
            await self._registry.turn(ended, [])
