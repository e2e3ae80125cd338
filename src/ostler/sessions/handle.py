"""What code that serves sessions is given: its worker, and the sessions that it holds. Standard library alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class SessionWorker:
    """The worker process that the code runs in.

    `socket` is the path of a Unix socket that it may listen on, `scratch` a directory of its own: both are removed after its end,
    however it ends. Other users can enter `scratch` but not list it; `private` in it is for the worker's user alone.
    """

    name: str  # worker:chromium:0
    generation: int
    socket: str
    scratch: Path
    slots: int
    _say: Callable[..., None] = field(repr=False)
    log: logging.Logger = field(default=logging.getLogger("ostler.sessions"), repr=False)

    def lost(self, why: str) -> None:
        """What the worker serves has died: its clients are told `why`, and the worker is replaced."""
        self._say("lost", str(why)[:200])


@dataclass(frozen=True, slots=True)
class Session:
    """One client's session."""

    id: str
    owner: str  # who it is for: token:NAME, user:UID
    client: str  # its address
    agent: str  # its User-Agent
    path: str  # what it asked for behind the pool's name
    key: str | None  # the name under which the client can come back
    _say: Callable[..., None] = field(repr=False)

    def lost(self, why: str) -> None:
        """What serves this session has died: its client is told `why`."""
        self._say("ended", self.id, str(why)[:200])

    @classmethod
    def of(cls, session: str, about: dict[str, Any], say: Callable[..., None]) -> Session:
        """As the node describes it."""
        owner, client, agent, path = (str(about.get(name) or "") for name in ("owner", "client", "agent", "path"))
        return cls(session, owner, client, agent, path, about.get("key"), say)
