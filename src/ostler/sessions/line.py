"""The line of clients that wait for a slot: bounded, and each waits until its deadline at the most. Pure.

The highest priority goes first; then the client whose owner has the fewest live sessions; then who came first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from ostler.sessions.selection import Key, Worker


class Refusal(NamedTuple):
    """Why a client gets no slot."""

    status: int
    code: str
    message: str
    retry: float  # seconds
    position: int | None = None  # in the line, when it had to leave


class Ticket(Protocol):
    """A client that wants a session."""

    owner: str
    priority: int
    version: str | None
    pool: str | None  # only workers of this pool
    excluded: set[Key]  # workers whose connection failed for it
    asked: float  # when it came
    deadline: float
    number: int  # its turn; 0: none yet

    def granted(self, worker: Worker) -> None:
        """It waited, and has a slot now."""

    def refused(self, why: Refusal) -> None:
        """It waited in vain."""


class Line:
    """Who waits."""

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit
        self._waiting: dict[int, Ticket] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, ticket: Ticket) -> bool:
        return self._waiting.get(ticket.number) is ticket

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= self.limit

    def add(self, ticket: Ticket) -> None:
        """It waits."""
        self._waiting[ticket.number] = ticket

    def leave(self, ticket: Ticket) -> bool:
        """It does not wait any more; whether it did."""
        if ticket not in self:
            return False
        del self._waiting[ticket.number]
        return True

    def order(self, live: Mapping[str, int]) -> list[Ticket]:
        """All who wait, the first one first. `live`: sessions of each owner."""
        return sorted(self._waiting.values(), key=lambda t: (-t.priority, live.get(t.owner, 0), t.number))

    def position(self, ticket: Ticket, live: Mapping[str, int]) -> int:
        """1: it is the next."""
        return self.order(live).index(ticket) + 1

    def expired(self, now: float) -> list[Ticket]:
        """Those who have waited for too long."""
        return [ticket for ticket in self._waiting.values() if ticket.deadline <= now]

    def due(self) -> float:
        """When the next one has waited for too long."""
        return min((ticket.deadline for ticket in self._waiting.values()), default=math.inf)

    def waits(self, owner: str) -> int:
        return sum(ticket.owner == owner for ticket in self._waiting.values())
