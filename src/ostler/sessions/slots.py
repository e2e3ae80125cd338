"""Slots of workers, and who gets them: workers, lines and the choice between them, as one thing. Pure.

Nothing here knows a clock or a socket: the time comes with each verb. Between two verbs nobody waits for a slot that is free and
that it could have. A client holds a slot from `ask` (or `granted`) to `done`; one that left is taken out of its line.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Protocol

from ostler.sessions.line import Line, Refusal, Ticket
from ostler.sessions.selection import Key, Ready, Worker, choose


class Wanted(Protocol):
    """What a client needs."""

    @property
    def owner(self) -> str: ...

    @property
    def version(self) -> str | None: ...

    @property
    def pool(self) -> str | None: ...

    @property
    def excluded(self) -> Collection[Key]: ...


@dataclass(slots=True, eq=False)
class Group:
    """What is served under one public name: its pools, their workers, and the line for them."""

    name: str
    pools: dict[str, dict[str, Any]] = field(default_factory=dict)  # terms by pool
    ready: Ready = field(default_factory=Ready)
    line: Line = field(default_factory=Line)
    counts: Counter[str] = field(default_factory=Counter)
    cdp: dict[str, Any] | None = None  # what CDP clients are told of its browsers; kept while no worker is there

    @property
    def wait(self) -> float:
        """How long a client may wait."""
        return max((float(terms["line_wait"]) for terms in self.pools.values()), default=0.0)


class Slots:
    """All pools of the node."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self.workers: dict[Key, Worker] = {}
        self.live: Counter[str] = Counter()  # sessions by owner
        self._group_of: dict[str, Group] = {}  # by pool
        self._numbers = itertools.count(1)

    # ---- pools

    def learn(self, pools: dict[str, dict[str, Any]]) -> None:
        """These are the pools; what has changed counts from now on."""
        names = {str(terms.get("serves") or pool) for pool, terms in pools.items()}
        for name in self.groups.keys() - names:
            group = self.groups[name]
            group.pools = {}
            if not len(group.line):
                del self.groups[name]
        self._group_of = {}
        for name in names:
            group = self.groups.setdefault(name, Group(name))
            group.pools = {p: t for p, t in pools.items() if str(t.get("serves") or p) == name}
            group.line.limit = max(int(terms["line"]) for terms in group.pools.values())
            self._group_of.update(dict.fromkeys(group.pools, group))
        for worker in self.workers.values():
            self._place(worker)

    def group(self, name: str) -> tuple[Group, str | None] | None:
        """What a client means by a name: a public one, or that of one pool alone."""
        if found := self.groups.get(name):
            return found, None
        return (of, name) if (of := self._group_of.get(name)) else None

    def of(self, worker: Worker) -> Group | None:
        return self._group_of.get(worker.pool)

    # ---- workers

    def up(self, worker: Worker, now: float) -> None:
        """It serves."""
        self.workers[worker.key] = worker
        self._place(worker)
        self.serve(now)

    def close(self, key: Key) -> Worker | None:
        """No new sessions for it."""
        worker = self.workers.get(key)
        if worker is not None:
            worker.is_open = False
            self._place(worker)
        return worker

    def down(self, key: Key) -> Worker | None:
        """It is gone; who is in it calls `done` as always."""
        worker = self.close(key)
        self.workers.pop(key, None)
        return worker

    def strike(self, worker: Worker) -> None:
        """A connection to it failed: it is the last choice until one does not."""
        worker.strikes += 1
        self._place(worker)

    def praise(self, worker: Worker) -> None:
        """A connection to it was made."""
        if worker.strikes:
            worker.strikes = 0
            self._place(worker)

    def _place(self, worker: Worker) -> None:
        group = self._group_of.get(worker.pool)
        for other in self.groups.values():
            if other is not group:
                other.ready.remove(worker)
        if group is None:
            return
        terms = group.pools[worker.pool]
        worker.margin = int(terms["margin"])
        if worker.is_open and not terms["paused"] and worker.key in self.workers:
            group.ready.put(worker)
        else:
            group.ready.remove(worker)

    # ---- clients

    def ask(self, group: Group, client: Ticket, now: float) -> Worker | Refusal | None:
        """A worker in which it has a slot, or why not, or None: it waits, and hears of it later. One that asks again, because a
        connection failed, has its old turn and is not refused.
        """
        is_new = not client.number
        if is_new:
            client.number = next(self._numbers)
        if worker := self._take(group, client):
            return worker
        if group.line.is_full and is_new:
            return Refusal(
                429,
                "LINE_FULL",
                f"all slots of {group.name} are taken, and {len(group.line)} clients wait already, which is the most that may",
                self.patience(group),
            )
        group.line.add(client)
        return None

    def reserve(self, group: Group, client: Wanted) -> Worker | None:
        """A slot that is free at once, for a client that is on its way. Nobody in line is passed: it would have had it."""
        return self._take(group, client)

    def leave(self, group: Group, client: Ticket) -> bool:
        """It does not wait any more; whether it did."""
        return group.line.leave(client)

    def forgive(self, group: Group, client: Ticket, now: float) -> None:
        """It still waits, though some workers failed it: they may be well again, or what failed was one endpoint of many."""
        if client in group.line:
            client.excluded.clear()
            self._serve(group, now)

    def done(self, worker: Worker, owner: str, now: float) -> None:
        """A slot is free again: the head of the line has it."""
        worker.in_use -= 1
        self.forget(owner)
        self._changed(worker)
        if group := self._group_of.get(worker.pool):
            self._serve(group, now)

    def undone(self, worker: Worker) -> None:
        """The session that had the slot never began: it does not count for the worker's lifetime. Call it before `done`."""
        worker.served -= 1

    def count(self, owner: str) -> None:
        """It has a session more, here or on another node."""
        self.live[owner] += 1

    def forget(self, owner: str) -> None:
        self.live[owner] -= 1
        if not self.live[owner]:
            del self.live[owner]

    def held(self, owner: str) -> int:
        """Sessions that it has or waits for."""
        return self.live.get(owner, 0) + sum(group.line.waits(owner) for group in self.groups.values())

    # ---- the clock

    def tick(self, now: float) -> float:
        """Refuse who has waited for too long; when to look again."""
        for group in [*self.groups.values()]:
            for client in group.line.expired(now):
                position = group.line.position(client, self.live)
                group.line.leave(client)
                group.counts["expired"] += 1
                client.refused(self._in_vain(group, client, now, position))
        return min((group.line.due() for group in self.groups.values()), default=math.inf)

    def patience(self, group: Group) -> float:
        """After how many seconds it may be worth another try."""
        return min(30.0, max(1.0, math.ceil(group.wait / 4)))

    def serve(self, now: float) -> None:
        """Give the slots that are free to those who wait."""
        for group in [*self.groups.values()]:
            self._serve(group, now)

    # ---- inside

    def _serve(self, group: Group, now: float) -> None:
        while len(group.line) and group.ready.has_free:
            for client in group.line.order(self.live):
                if client.deadline > now and (worker := self._take(group, client)):
                    group.line.leave(client)
                    client.granted(worker)
                    break
            else:
                return

    def _take(self, group: Group, client: Wanted) -> Worker | None:
        worker = choose(group.ready, client.version, client.excluded, client.pool)
        if worker is not None:
            worker.in_use += 1
            worker.served += 1
            self.count(client.owner)
            self._changed(worker)
        return worker

    def _changed(self, worker: Worker) -> None:
        if (group := self._group_of.get(worker.pool)) and worker in group.ready:
            group.ready.put(worker)

    def _in_vain(self, group: Group, client: Ticket, now: float, position: int) -> Refusal:
        waited = f"waited {now - client.asked:.0f} s at place {position} of the line"
        fits = [w for w in group.ready if w.serves(client.version) and client.pool in (None, w.pool)]
        if not fits:
            message = f"no worker of {group.name} is ready for this client; it {waited}"
            return Refusal(503, "NO_WORKER", message, self.patience(group), position)
        if all(w.key in client.excluded for w in fits):
            message = f"no connection to any of the {len(fits)} workers of {group.name} could be made; it {waited}"
            return Refusal(503, "NO_WORKER", message, self.patience(group), position)
        message = f"no slot of {group.name} became free in time: the client {waited}"
        return Refusal(503, "LINE_TIMEOUT", message, self.patience(group), position)
