"""The queues: how many jobs wait, run and ended in each, how fast they are worked off, and all of them together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ostler.jobs.dispatcher import Dispatcher
from ostler.jobs.poll import Poll
from ostler.lifecycle.state import Status
from ostler.lifecycle.supervisor import Supervisor
from ostler.live import states
from ostler.live.broker import Broker
from ostler.store import now_ms
from ostler.store.fleet import Fleet
from ostler.store.live import FINE
from ostler.store.store import Store

_ABLE = (Status.HEALTHY, Status.STARTING)


class Counts(NamedTuple):
    """What the store counts, by queue."""

    depths: dict[str, dict[str, int]]
    totals: dict[str, dict[str, int]]
    averages: dict[str, float]
    newest: dict[str, dict[str, int]]
    running: dict[str, list[int]]


class Queues:
    """The queues as the broker has them. Only what happened makes news, not the clock."""

    def __init__(
        self, broker: Broker, supervisor: Supervisor, dispatcher: Dispatcher, poll: Poll, declared: list[str]
    ) -> None:
        self._broker, self._supervisor, self._dispatcher = broker, supervisor, dispatcher
        self._poll, self._declared = poll, declared
        self._told: dict[str, tuple[Any, dict[str, Any]]] = {}  # queue -> what it was made from, and its state
        self._recent: dict[str, Any] | None = None

    @staticmethod
    def read(store: Store) -> Counts:
        """Runs on the lane of the store."""
        now, live = now_ms(), store.live
        depths, totals, averages = store.jobs.depths(), live.tallies.totals(), live.tallies.averages(now)
        return Counts(depths, totals, averages, live.tallies.newest(now), live.running_since())

    def tell(self, found: Counts, fleet: Fleet | None) -> None:
        """Publish the queues that have changed, and all together."""
        now = now_ms()
        for name in sorted({*self._declared, *found.depths, *found.totals}):
            counts, totals = found.depths.get(name, {}), found.totals.get(name, {})
            workers, paused = self._capacity(name, fleet)
            # Averages move with the clock, too; only what happened makes news.
            stuck = self._poll.unrunnable[name]
            made_from = (counts, totals, workers, paused, stuck, found.running.get(name))
            known = self._told.get(name)
            if known is not None and known[0] == made_from:
                continue
            bucket = found.newest.get(name)
            limit = self._dispatcher.limits.get(name)
            state = states.queue(
                name,
                counts=counts,
                totals=totals,
                average=found.averages.get(name),
                recent=states.recent(bucket, FINE) if bucket else (known[1]["recent"] if known else None),
                running_for=[max(0, now - at) / 1000 for at in found.running.get(name, ())],
                workers=workers,
                paused=paused,
                rate=limit.rate if limit else None,
                stuck=stuck,
            )
            self._told[name] = (made_from, state)
            self._broker.publish(f"queue:{name}:status", "queue_update", "queue", state)
        if totals_now := _summed(found.newest):
            self._recent = states.recent(totals_now, FINE)
        everything = states.all_queues([state for _, state in self._told.values()], self._recent)
        self._broker.publish("queue:status", "queue_update", "queue", everything)

    def _capacity(self, queue: str, fleet: Fleet | None) -> tuple[int, bool]:
        """How many workers of all nodes take jobs of the queue, and whether it is paused."""
        pool, own = self._supervisor.pools.get(queue), self._supervisor.member.id
        able = sum(1 for slot in pool.slots if slot.status in _ABLE) if pool else 0
        for row in fleet.workers if fleet else ():
            able += row["pool"] == queue and row["node_id"] != own and row["status"] in _ABLE
        limit = self._dispatcher.limits.get(queue)
        if limit is not None and limit.at_once is not None:
            able = min(able, limit.at_once)
        return able, self._supervisor.pauses.holds(queue)


def _summed(buckets: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """The counters of all queues in one bucket."""
    total: dict[str, int] = {}
    for counts in buckets.values():
        for name, n in counts.items():
            total[name] = n if name == "at" else total.get(name, 0) + n
    return total
