"""Metrics of sessions for Prometheus: how they began and ended is counted from events, the rest is read when somebody asks.

The label `pool` is the name that clients connect to. Reasons are those of docs/sessions.md, so labels are bounded.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ostler.events import Bus, SessionBegan, SessionEnded, WorkerBroken, WorkerDrained
from ostler.sessions.shown import Sessions

_WAITED = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 20, 30, 60)
_DRAINED = (0.01, 0.1, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300)
_LASTED = (0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600, 10_800, 21_600)
_COUNTED = {
    "admitted": "Sessions that were given a slot",
    "refused": "Connects that were refused: the line was full, or the client asked for what is not served",
    "left": "Clients that left the line before it was their turn",
    "expired": "Clients that waited in line as long as they may",
    "strikes": "Connects to a worker that failed, and were tried with another",
}


class Bins:
    """Durations, counted by upper bound."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._bins, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self._bins[bisect_left(self._bounds, seconds)] += count
        self._sum += seconds * count

    def put(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        upper = [*map(str, map(float, self._bounds)), "+Inf"]
        family.add_metric(labels, [*zip(upper, map(float, itertools.accumulate(self._bins)), strict=True)], self._sum)


class SessionMetrics(Collector):
    """Listens to the bus from the node's start. `sessions` is None where the app has no session pools: then there is nothing to tell."""

    def __init__(self, bus: Bus) -> None:
        self.sessions: Sessions | None = None
        self._ended: dict[tuple[str, str], int] = {}
        self._broken: dict[tuple[str, str], int] = {}
        self._cut: dict[str, int] = {}
        self._waited: dict[str, Bins] = {}
        self._lasted: dict[str, Bins] = {}
        self._drained: dict[str, Bins] = {}
        bus.listen(self._heard)

    def _heard(self, event: Any) -> None:
        match event:
            case SessionBegan(pool, waited):
                self._waited.setdefault(pool, Bins(_WAITED)).add(waited)
            case SessionEnded():
                key = event.pool, event.reason
                self._ended[key] = self._ended.get(key, 0) + 1
                self._lasted.setdefault(event.pool, Bins(_LASTED)).add(event.seconds)
            case WorkerBroken(_, pool, what):
                self._broken[pool, what] = self._broken.get((pool, what), 0) + 1
            case WorkerDrained(_, pool, seconds, cut):
                self._drained.setdefault(pool, Bins(_DRAINED)).add(seconds)
                self._cut[pool] = self._cut.get(pool, 0) + cut

    def describe(self) -> Iterator[Metric]:
        """Nothing: what there is depends on the moment."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        if self.sessions is not None:
            yield from self._told()
            yield from self._now(self.sessions)
            yield from _counted(self.sessions)

    def _told(self) -> Iterator[Metric]:
        ended = CounterMetricFamily("ostler_sessions", "Sessions by why they ended", labels=["pool", "reason"])
        for label, n in self._ended.items():
            ended.add_metric(label, n)
        broken = CounterMetricFamily(
            "ostler_session_workers_broken", "Session workers that hung or were lost", labels=["pool", "what"]
        )
        for label, n in self._broken.items():
            broken.add_metric(label, n)
        cut = CounterMetricFamily("ostler_session_drain_cut", "Sessions that a drain limit ended", labels=["pool"])
        for pool, n in self._cut.items():
            cut.add_metric([pool], n)
        yield from (ended, broken, cut)
        for name, text, found in (
            ("ostler_session_wait_seconds", "Time of sessions in line", self._waited),
            ("ostler_session_seconds", "How long sessions lasted", self._lasted),
            ("ostler_session_drain_seconds", "How long workers took to drain", self._drained),
        ):
            family = HistogramMetricFamily(name, text, labels=["pool"])
            for pool, bins in found.items():
                bins.put(family, [pool])
            yield family

    def _now(self, sessions: Sessions) -> Iterator[Metric]:
        gauges = {
            "in_use": GaugeMetricFamily("ostler_sessions_live", "Sessions under way", labels=["pool"]),
            "slots": GaugeMetricFamily("ostler_sessions_slots", "Slots of workers that serve", labels=["pool"]),
            "free": GaugeMetricFamily("ostler_sessions_free", "Slots that a client can have now", labels=["pool"]),
            "waiting": GaugeMetricFamily("ostler_sessions_waiting", "Clients in line", labels=["pool"]),
        }
        workers = GaugeMetricFamily("ostler_session_workers", "Session workers by status", labels=["pool", "status"])
        probe = GaugeMetricFamily(
            "ostler_session_probe_seconds",
            "Time that a worker took to answer its last probe",
            labels=["pool", "worker"],
        )
        served = GaugeMetricFamily(
            "ostler_session_worker_served",
            "Sessions that a worker has served since it was started",
            labels=["pool", "worker"],
        )
        for pool, found in sessions.capacity().items():
            for name, gauge in gauges.items():
                gauge.add_metric([pool], found[name])
            statuses: dict[str, int] = {}
            for worker in found["workers"]:
                statuses[worker["status"]] = statuses.get(worker["status"], 0) + 1
                served.add_metric([pool, worker["component"]], worker["served"])
                if worker["probe_ms"] is not None:
                    probe.add_metric([pool, worker["component"]], worker["probe_ms"] / 1000)
            for status, n in statuses.items():
                workers.add_metric([pool, status], n)
        yield from (*gauges.values(), workers, probe, served)


def _counted(sessions: Sessions) -> Iterator[Metric]:
    """What the plane counts, and the node adds up."""
    families = {
        name: CounterMetricFamily(f"ostler_session_{name}", text, labels=["pool"]) for name, text in _COUNTED.items()
    }
    passed = CounterMetricFamily(
        "ostler_session_bytes", "Bytes relayed: in from clients, out to them", labels=["pool", "direction"]
    )
    for pool, counts in sessions.counts().items():
        for name, family in families.items():
            family.add_metric([pool], counts.get(name, 0))
        passed.add_metric([pool, "in"], counts.get("bytes_in", 0))
        passed.add_metric([pool, "out"], counts.get("bytes_out", 0))
    yield from (*families.values(), passed)
