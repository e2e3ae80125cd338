"""What a node holds of sessions in memory: the workers that take them, those that are under way, and what was counted."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ostler.lifecycle.state import Status
from ostler.lifecycle.worker import Worker
from ostler.sessions.registry import Admission, WorkerEntry, WorkerKey
from ostler.sessions.spec import SessionSpec

_NOTED = 0.05  # seconds after which a worker is told of sessions that it need not know of to begin


@dataclass(slots=True, eq=False)
class Serving:
    """A worker that takes sessions, or finishes those that it has."""

    worker: Worker
    spec: SessionSpec
    info: dict[str, Any]
    live: set[str] = field(default_factory=set)
    closing: bool = False  # it takes no new ones
    cutting: asyncio.TimerHandle | None = None
    draining_since: float | None = None
    cut: int = 0  # sessions that the drain limit ended
    gone: tuple[str, str] | None = None  # it has ended, or is being killed: reason and text for its sessions
    buried: bool = False  # … and nothing of it lives any more
    probe_ms: float | None = None
    mb: float | None = None
    notes: list[Sequence[object]] = field(default_factory=list)  # what the worker is told in a moment

    @property
    def takes(self) -> bool:
        """Whether it may be given new sessions. One that is to be replaced serves until the other one is there."""
        worker = self.worker
        leaves = self.closing or self.gone is not None or worker.leave or worker.killing is not None
        return not leaves and worker.status is Status.HEALTHY and worker.ended is None

    def note(self, *frame: object) -> None:
        """Tell the worker of a session in a moment: nobody waits for it, and clients that connect now need the processor."""
        if not self.notes:
            asyncio.get_running_loop().call_later(_NOTED, self._tell)
        self.notes.append(frame)

    def _tell(self) -> None:
        notes, self.notes = self.notes, []
        if self.gone is None:
            for frame in notes:
                self.worker.send(*frame)

    @property
    def key(self) -> WorkerKey:
        return WorkerKey(self.worker.component, self.worker.generation)

    def entry(self) -> WorkerEntry:
        """As the registry knows it."""
        options = self.spec.options
        return WorkerEntry(
            *self.key,
            pool=self.spec.name,
            serves=self.spec.serves,
            address=str(self.info["address"]),
            slots=options.slots,
            lifetime=options.lifetime,
            served=self.worker.served,
            versions=tuple(str(v) for v in (self.info.get("versions") or options.versions)),
        )


@dataclass(slots=True, eq=False)
class Live:
    """A session of this node, from its admission on."""

    id: str
    serving: Serving
    about: dict[str, Any]
    asked: float
    started_at: int
    has_row: bool = False
    opened: dict[str, Any] | None = None
    is_open: bool = False  # the worker has opened it, or need not
    admitted: bool = False
    again: bool = False  # the registry has refused it once
    ticket: str = ""
    clock: asyncio.TimerHandle | None = None
    bytes_in: int = 0
    bytes_out: int = 0
    idle: float = 0.0
    state: str = "opening"
    by: str | None = None  # the operator who asked for its end

    def admission(self) -> Admission:
        """As the registry is asked for it."""
        about, spec = self.about, self.serving.spec
        return Admission(
            self.id,
            *self.serving.key,
            pool=spec.name,
            serves=spec.serves,
            owner=str(about.get("owner") or ""),
            priority=int(about.get("priority") or 0),
            client=about.get("client"),
            agent=about.get("agent"),
            key=about.get("key"),
            via=about.get("via"),
            waited_ms=float(about.get("waited_ms") or 0.0),
        )


@dataclass(slots=True)
class Counts:
    """What happened to the sessions of one name since the node started."""

    plane: Counter[str] = field(default_factory=Counter)  # admitted, refused, left, expired, bytes_in, bytes_out
    before: Counter[str] = field(default_factory=Counter)  # the same, of planes before this one
    strikes: int = 0
