"""What is paused: one owner. A pause is in force at once, and acknowledged when the store has it for good.

Other processes may pause, too, and write only the store. What was read from the store while a write of our own was on its
way may be older than that write; it is dropped, and the next poll reads again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ostler.events import Bus, PoolPaused
from ostler.lifecycle.worker import Pool
from ostler.store.lanes import Lane

ALL = "worker_enabled"
PLANE = "plane"
"""The pool of Ostler's own process, which takes the connections of clients. It is never paused."""
NO_PAUSE = (
    f"{PLANE} is Ostler's own process, which takes the connections of clients for calls and sessions, and cannot be paused; "
    "pause the models or sessions themselves, or everything with `ostler pause`"
)


class Pauses:
    """The pauses of one node's pools. Runs on the node's loop."""

    def __init__(self, pools: Mapping[str, Pool], lane: Lane, patience: float, bus: Bus) -> None:
        self.enabled = True  # False: every pool is paused
        self._pools, self._lane, self._patience, self._bus = pools, lane, patience, bus
        self._writes = 0  # begun, ever
        self._under_way = 0
        self.changed: Callable[[Iterable[Pool]], None] = lambda _: None  # told which pools

    def holds(self, pool: str) -> bool:
        """Whether workers of the pool take nothing new."""
        found = self._pools.get(pool)
        if found is not None and found.spec.tenant.kind == PLANE:
            return False
        return not self.enabled or (found is not None and found.paused)

    async def set(self, pool: str | None, *, paused: bool) -> None:
        """Pause or resume a pool of any node (None: all; resuming all resumes those that were paused by name, too).

        When this returns, it survives a power cut. Raises StoreBusy.
        """
        flags = {ALL: "false" if paused else "true"} if pool is None else {f"pool_paused:{pool}": str(paused).lower()}
        every = pool is None and not paused
        self._apply(pool, paused=paused)
        for name in [name for name, known in self._pools.items() if every and known.paused]:
            self._apply(name, paused=False)
        self._writes += 1
        self._under_way += 1
        try:
            await self._lane.call(lambda store: store.meta.set_pauses(flags, resume_all=every), patience=self._patience)
        finally:
            self._under_way -= 1

    def mark(self) -> int | None:
        """Call before the store is read; hand the answer to `seen`."""
        return self._writes if not self._under_way else None

    def seen(self, mark: int | None, enabled: bool, paused: frozenset[str], *, still: bool = False) -> bool:
        """What the store says. Dropped where a write of our own was under way. Returns whether anything changed."""
        if mark is None or mark != self._writes or self._under_way:
            return False
        before = (self.enabled, {name for name, pool in self._pools.items() if pool.paused})
        if enabled != self.enabled:
            self._apply(None, paused=not enabled, still=still)
        for name, pool in self._pools.items():
            if pool.paused != (name in paused):
                self._apply(name, paused=name in paused, still=still)
        return before != (self.enabled, {name for name, pool in self._pools.items() if pool.paused})

    def _apply(self, pool: str | None, *, paused: bool, still: bool = False) -> None:
        if pool is None:
            self.enabled = not paused
        elif pool in self._pools:
            self._pools[pool].paused = paused
        else:
            return  # of other nodes alone
        self._bus.send(PoolPaused(pool, paused, still))
        self.changed(self._pools.values() if pool is None else [self._pools[pool]])
