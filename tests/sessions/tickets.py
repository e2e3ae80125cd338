"""Clients without sockets, for tests of lines and slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ostler.sessions.line import Refusal
from ostler.sessions.selection import Key, Worker
from ostler.sessions.slots import Slots

TERMS: dict[str, Any] = {"line": 100, "line_wait": 30.0, "margin": 5, "paused": False}


@dataclass(eq=False)
class Client:
    """What a test knows of one client."""

    owner: str = "a"
    priority: int = 0
    version: str | None = None
    pool: str | None = None
    asked: float = 0.0
    deadline: float = 30.0
    excluded: set[Key] = field(default_factory=set)
    number: int = 0
    worker: Worker | None = None
    why: Refusal | None = None
    tell: Callable[[Client], None] = lambda _: None

    def granted(self, worker: Worker) -> None:
        self.worker = worker
        self.tell(self)

    def refused(self, why: Refusal) -> None:
        self.why = why


def slots_of(**pools: dict[str, Any]) -> Slots:
    """Slots that know these pools."""
    slots = Slots()
    slots.learn({name: {**TERMS, "serves": name, **terms} for name, terms in pools.items()})
    return slots


def worker(number: int = 0, *, pool: str = "p", slots: int = 1, generation: int = 1, **more: Any) -> Worker:
    return Worker(f"worker:{pool}:{number}", generation, pool, slots, **more)
