"""Capacity that recycling costs, simulated: the seed's policy, and ours with its own selection, line and limits (sessions/slots.py).

4 workers of 5 slots, 50 sessions a life, 3 s to start, sessions of exponential length that come as a Poisson process. The seed: the
worker with the most sessions behind it is filled first; one that has had its 50 is told at its next heartbeat (10 s), drains for at
most 30 s, exits and starts again. Ours: a replacement is started 5 sessions before the limit, one at a time in a pool; when it is
there, the old one drains. A worker counts as lost while it takes no new sessions.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ostler.lifecycle.recycle import RecycleLimits, due
from ostler.sessions.selection import Worker
from ostler.sessions.slots import Slots


@dataclass(frozen=True)
class Case:
    """What is simulated."""

    load: float  # of all slots
    mean: float  # seconds of a session
    workers: int = 4
    slots: int = 5
    lifetime: int = 50
    margin: int = 5
    restart: float = 3.0
    beat: float = 10.0
    drain: float = 30.0
    sessions: int = 40_000

    @property
    def rate(self) -> float:
        return self.load * self.workers * self.slots / self.mean


@dataclass
class Found:
    lost: float = 0.0  # share of the capacity
    two_out: float = 0.0  # share of the time with two workers or more out of service
    killed: float = 0.0  # share of the sessions
    wait_p99: float = 0.0


class Simulation:
    """The clock, the clients, and what is measured. A policy says who serves."""

    def __init__(self, case: Case, seed: int = 1) -> None:
        self.case, self.now = case, 0.0
        self.chance = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._lost = self._two = self._since = 0.0
        self.waits: list[float] = []
        self.killed = 0

    def after(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), then))

    def serving(self) -> int:
        raise NotImplementedError

    def arrives(self) -> None:
        raise NotImplementedError

    def length(self) -> float:
        return self.chance.expovariate(1 / self.case.mean)

    def run(self) -> Found:
        come = 0

        def next_one() -> None:
            nonlocal come
            come += 1
            self.arrives()
            if come < self.case.sessions:
                self.after(self.chance.expovariate(self.case.rate), next_one)

        self.after(0.0, next_one)
        end = 0.0
        while self._events:
            when, _, then = heapq.heappop(self._events)
            if come < self.case.sessions:  # what follows the last arrival is not counted
                out = max(0, self.case.workers - self.serving())
                self._lost += (when - self.now) * out / self.case.workers
                self._two += (when - self.now) * (out >= 2)
                end = when
            self.now = when
            then()
        self.waits.sort()
        p99 = self.waits[int(len(self.waits) * 0.99)]
        return Found(self._lost / end, self._two / end, self.killed / come, p99)


# ---- the seed


class Old:
    def __init__(self) -> None:
        self.served = self.in_use = 0
        self.live: set[int] = set()
        self.takes, self.phase = True, 0.0


class Seed(Simulation):
    def __init__(self, case: Case, seed: int = 1) -> None:
        super().__init__(case, seed)
        self._workers = [Old() for _ in range(case.workers)]
        self._line: deque[float] = deque()
        self._ids = itertools.count()
        for worker in self._workers:
            worker.phase = self.chance.uniform(0, case.beat)

    def serving(self) -> int:
        return sum(w.takes and w.served < self.case.lifetime for w in self._workers)

    def arrives(self) -> None:
        self._line.append(self.now)
        self._serve()

    def _serve(self) -> None:
        while self._line:
            free = [
                w for w in self._workers if w.takes and w.served < self.case.lifetime and len(w.live) < self.case.slots
            ]
            if not free:
                return
            worker = max(free, key=lambda w: w.served)
            self.waits.append(self.now - self._line.popleft())
            worker.served += 1
            session = next(self._ids)
            worker.live.add(session)
            self.after(self.length(), lambda w=worker, s=session: self._ends(w, s))
            if worker.served == self.case.lifetime:
                self.after((worker.phase - self.now) % self.case.beat, lambda w=worker: self._drains(w))

    def _ends(self, worker: Old, session: int) -> None:
        worker.live.discard(session)
        self._serve()

    def _drains(self, worker: Old) -> None:
        worker.takes = False
        until = self.now + self.case.drain

        def look() -> None:
            if worker.live and self.now < until - 1e-6:
                self.after(min(1.0, until - self.now), look)
                return
            self.killed += len(worker.live)
            worker.live.clear()
            self.after(self.case.restart, lambda: self._fresh(worker))

        look()

    def _fresh(self, worker: Old) -> None:
        worker.served, worker.takes, worker.phase = 0, True, self.now % self.case.beat
        self._serve()


# ---- ours


class Client:
    """A ticket of the line (sessions/line.py)."""

    owner, priority, version, pool, number = "somebody", 0, None, None, 0
    deadline = math.inf

    def __init__(self, of: Ours) -> None:
        self._of, self.asked = of, of.now
        self.excluded: set = set()

    def granted(self, worker: Worker) -> None:
        self._of.begins(self, worker)

    def refused(self, why: object) -> None:
        raise AssertionError(why)


class Ours(Simulation):
    def __init__(self, case: Case, seed: int = 1) -> None:
        super().__init__(case, seed)
        self.slots = Slots()
        terms = {"margin": case.margin, "line": 10**9, "line_wait": math.inf, "paused": False}
        self.slots.learn({"pool": terms})
        self._group = self.slots.groups["pool"]
        self._limits = RecycleLimits(count=case.lifetime - case.margin, warm=True)
        self._recycling: Worker | None = None
        self._live: dict[Worker, set[Client]] = {}
        for number in range(case.workers):
            self._up(f"worker:{number}", 1)

    def _up(self, component: str, generation: int) -> None:
        worker = Worker(component, generation, "pool", self.case.slots, self.case.lifetime)
        self._live[worker] = set()
        self.slots.up(worker, self.now)

    def serving(self) -> int:
        return sum(w.left > 0 for w in self._group.ready)

    def arrives(self) -> None:
        client = Client(self)
        worker = self.slots.ask(self._group, client, self.now)
        if isinstance(worker, Worker):
            self.begins(client, worker)

    def begins(self, client: Client, worker: Worker) -> None:
        self.waits.append(self.now - client.asked)
        self._live[worker].add(client)
        self.after(self.length(), lambda: self._ends(client, worker))
        self._consider()

    def _ends(self, client: Client, worker: Worker) -> None:
        if client in self._live[worker]:
            self._live[worker].remove(client)
            self.slots.done(worker, client.owner, self.now)

    def _consider(self) -> None:
        if self._recycling is None:
            for worker in self._group.ready:
                if due(self._limits, served=worker.served, age=0.0, rss_mb=None):
                    self._recycling = worker
                    self.after(self.case.restart, self._succeed)
                    return

    def _succeed(self) -> None:
        old = self._recycling
        assert old is not None
        self._up(old.component, old.generation + 1)
        self.slots.close(old.key)
        self._recycling = None
        self.after(self.case.drain, lambda: self._cut(old))
        self._consider()

    def _cut(self, old: Worker) -> None:
        self.killed += len(self._live[old])
        for client in [*self._live[old]]:
            self._ends(client, old)


if __name__ == "__main__":
    for load, mean in ((0.6, 2.0), (0.6, 20.0), (0.8, 2.0), (0.8, 20.0)):
        case = Case(load, mean)
        print(load, mean, Seed(case).run(), Ours(case).run(), sep="\n  ")
