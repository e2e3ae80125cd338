"""Metrics for Prometheus (seed 002, R11): counted from events, gauges read when somebody asks."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response

from ostler.events import Backpressure, Beats, Bus, ClaimLost, ClaimMissed, JobEnded, Recovered, RunsDone, WorkerMoved
from ostler.store import fleet, now_ms
from ostler.web.context import Context
from ostler.web.session_metrics import Bins, SessionMetrics

_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600)


class _Durations(Collector):
    """How long runs took. Counted many at a time, which the library's own histogram cannot: it would cost a flood of short jobs 0.7 us each."""

    def __init__(self) -> None:
        self._of: dict[str, Bins] = {}

    def add(self, task: str, seconds: float, count: int = 1) -> None:
        if (bins := self._of.get(task)) is None:
            bins = self._of[task] = Bins(_BUCKETS)
        bins.add(seconds, count)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily("ostler_run_seconds", "Duration of runs", labels=["task"])
        for task, bins in self._of.items():
            bins.put(family, [task])
        yield family


class Metrics:
    """Listens to the bus from the node's start."""

    def __init__(self, bus: Bus) -> None:
        self.registry = CollectorRegistry()
        counter = self._counter
        self.heartbeats = counter("worker_heartbeats", "Beats of workers written to the store")
        self.recovered = counter("worker_recovered_jobs", "Jobs that went back to the queue", ["reason"])
        self.retries = counter("worker_retry_attempts", "Runs that failed and are tried again", ["code"])
        self.duplicates = counter("worker_duplicate_skips", "Late results that were dropped because the claim was lost")
        self.missed = counter("worker_atomic_acquire_fail", "Jobs picked for a claim that somebody else had by then")
        self.pauses = counter("worker_pauses", "Pauses of claiming by backpressure")
        self.ended = counter("ostler_runs", "Runs of jobs by how they ended", ["task", "queue", "event"])
        self.crashes = counter("ostler_worker_crashes", "Crashes of workers", ["pool"])
        self.restarts = counter("ostler_worker_starts", "Starts of workers", ["pool"])
        self.durations = _Durations()
        self.registry.register(self.durations)
        gauge = self._gauge
        self.inflight = gauge("worker_inflight_jobs", "Jobs that run on this node now", ["node"])
        self.depth = gauge("ostler_queue_jobs", "Jobs by queue and status", ["queue", "status"])
        self.oldest = gauge("ostler_queue_oldest_seconds", "Age of the oldest ready job", ["queue"])
        self.workers = gauge("ostler_workers", "Workers of this node by status", ["node", "pool", "status"])
        self.fleet = gauge("ostler_fleet_workers", "Workers of all nodes by status", ["node", "pool", "status"])
        self.nodes = gauge("ostler_node_up", "Whether a node lives, of all nodes", ["node"])
        self.sessions = SessionMetrics(bus)
        self.registry.register(self.sessions)
        bus.listen(self._heard)

    def _counter(self, name: str, text: str, labels: list[str] | None = None) -> Counter:
        return Counter(name, text, labels or [], registry=self.registry)

    def _gauge(self, name: str, text: str, labels: list[str]) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def _heard(self, event: Any) -> None:
        match event:
            case RunsDone(runs):
                self._done(runs)
            case JobEnded(_, task, queue, _, name, seconds, code):
                self.ended.labels(task, queue, name).inc()
                self.durations.add(task, seconds)
                if name == "requeued:retry":
                    self.retries.labels(code or "ERROR").inc()
                elif name.startswith("requeued:"):
                    self.recovered.labels(name.removeprefix("requeued:")).inc()
            case Recovered(jobs, reason):
                self.recovered.labels(reason).inc(jobs)
            case Beats(count):
                self.heartbeats.inc(count)
            case ClaimLost():
                self.duplicates.inc()
            case ClaimMissed(count):
                self.missed.inc(count)
            case Backpressure():
                self.pauses.inc()
            case WorkerMoved(component, status=status):
                pool = component.split(":")[1]
                if status == "crashed":
                    self.crashes.labels(pool).inc()
                elif status == "starting":
                    self.restarts.labels(pool).inc()

    def _done(self, runs: Sequence[tuple[str, str, float]]) -> None:
        counts: collections.Counter[tuple[str, str]] = collections.Counter()
        for (task, queue, seconds), n in collections.Counter(runs).items():
            counts[task, queue] += n
            self.durations.add(task, seconds, n)
        for (task, queue), n in counts.items():
            self.ended.labels(task, queue, "done").inc(n)


def router(context: Context) -> APIRouter:
    routes = APIRouter(tags=["node"])
    metrics = context.metrics

    @routes.get("/metrics", name="metrics", response_class=PlainTextResponse, summary="Metrics for Prometheus")
    async def read() -> Response:
        """What counts events, and `ostler_workers` and `worker_inflight_jobs`, are of this node: add them up over all nodes. The
        other gauges are of the store: every node tells the same, so take one of them (`max by`).
        """
        depths, oldest, found = await context.reader.call(
            lambda store: (store.jobs.depths(), store.jobs.oldest(), fleet.read(store))
        )
        own = found.label(context.supervisor.member.id) or context.settings.node
        for gauge in (metrics.depth, metrics.oldest, metrics.workers, metrics.fleet, metrics.nodes, metrics.inflight):
            gauge.clear()
        metrics.inflight.labels(own).set(context.dispatcher.running())
        for queue in {*depths, *(t["queue"] for t in context.tasks.values())}:
            for status in ("queued", "scheduled", "processing", "failed", "cancelled"):
                metrics.depth.labels(queue, status).set(depths.get(queue, {}).get(status, 0))
            metrics.oldest.labels(queue).set(max(0, now_ms() - oldest[queue]) / 1000 if queue in oldest else 0)
        for slot in context.supervisor.slots.values():
            metrics.workers.labels(own, slot.pool.spec.name, slot.status).inc()
        for worker in found.workers:
            metrics.fleet.labels(worker["node"], worker["pool"], worker["status"]).inc()
        for node in found.nodes:
            metrics.nodes.labels(node["label"]).set(node["alive"])
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    return routes
