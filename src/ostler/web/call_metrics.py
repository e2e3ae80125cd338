"""Metrics of calls, models and memory for Prometheus: read from what the node has counted when somebody asks.

The plane counts and the node adds up what each report brings, so a plane that is replaced takes nothing back. Labels are bounded:
of ids that a task does not list, those beyond the first fifty are counted together as `other` (calls/records.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ostler.calls.records import CallLog
from ostler.calls.tally import BOUNDS
from ostler.lifecycle.ledger import Ledger

_MODEL = ["task", "model"]
_MB = 1_000_000


class CallMetrics(Collector):
    """`models` are those that can be called with their states; `memory` is the node's ledger."""

    def __init__(
        self, calls: CallLog, models: Callable[[], Mapping[str, Mapping[str, Any]]], memory: Ledger | None
    ) -> None:
        self._calls, self._models, self._memory = calls, models, memory

    def describe(self) -> Iterator[Metric]:
        """Nothing: what there is depends on the moment."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from self._counted()
        yield from self._now()
        if self._memory is not None:
            yield from _memory(self._memory.snapshot())

    def _counted(self) -> Iterator[Metric]:
        calls = CounterMetricFamily("ostler_calls", "Calls by how they ended", labels=[*_MODEL, "outcome"])
        took = HistogramMetricFamily("ostler_call_seconds", "Time of calls in their worker", labels=_MODEL)
        waited = HistogramMetricFamily("ostler_call_wait_seconds", "Time of calls in line", labels=_MODEL)
        received = CounterMetricFamily("ostler_call_received_bytes", "Bytes of calls' bodies", labels=_MODEL)
        sent = CounterMetricFamily("ostler_call_sent_bytes", "Bytes of models' answers", labels=_MODEL)
        loads = CounterMetricFamily("ostler_model_loads", "Loads of models", labels=_MODEL)
        seconds = CounterMetricFamily("ostler_model_load_seconds", "Time that loads took", labels=_MODEL)
        evictions = CounterMetricFamily("ostler_model_evictions", "Models that left for others' memory", labels=_MODEL)
        for label, counters in self._calls.counters.items():
            tally = counters.tally
            for outcome, n in tally.outcomes.items():
                calls.add_metric([*label, outcome], n)
            took.add_metric(label, _buckets(tally.took), tally.took_s)
            waited.add_metric(label, _buckets(tally.waited), tally.waited_s)
            received.add_metric(label, tally.bytes_in)
            sent.add_metric(label, tally.bytes_out)
            loads.add_metric(label, counters.loads)
            seconds.add_metric(label, counters.load_s)
            evictions.add_metric(label, counters.evictions)
        left = CounterMetricFamily(
            "ostler_calls_left_out", "Calls that are counted and not in the log", labels=["kind"]
        )
        for kind, n in self._calls.left_out.items():
            left.add_metric([kind], n)
        yield from (calls, took, waited, received, sent, loads, seconds, evictions, left)

    def _now(self) -> Iterator[Metric]:
        """Models that share a label are added up."""
        found: dict[tuple[str, str], list[int]] = {}
        states: dict[tuple[str, str], int] = {}
        for name, state in self._models().items():
            task, _, model = name.partition(":")
            states[task, state["state"].lower()] = states.get((task, state["state"].lower()), 0) + 1
            sums = found.setdefault((task, self._calls.label(task, model)), [0, 0, 0])
            up = sum(1 for slot in self._calls.slots(task, model) if slot.worker is not None and slot.worker.accepting)
            for number, n in enumerate((state["in_flight"], state["waiting"], up)):
                sums[number] += n
        names = {
            "ostler_calls_in_flight": "Calls in workers now",
            "ostler_calls_waiting": "Calls in line now",
            "ostler_model_workers": "Workers that have loaded the model and serve",
        }
        for number, (name, text) in enumerate(names.items()):
            gauge = GaugeMetricFamily(name, text, labels=_MODEL)
            for label, sums in found.items():
                gauge.add_metric(label, sums[number])
            yield gauge
        gauge = GaugeMetricFamily("ostler_models", "Models by state", labels=["task", "state"])
        for of_state, n in states.items():
            gauge.add_metric(of_state, n)
        yield gauge


def _memory(found: Mapping[str, Any]) -> Iterator[Metric]:
    """The host has the device `host`, a GPU its UUID."""
    names = {
        "total_mb": "total",
        "free_mb": "free",
        "reserved_mb": "reserved",
        "headroom_mb": "headroom",
        "room_mb": "room",
    }
    gauge = GaugeMetricFamily(
        "ostler_memory_bytes",
        "Memory by device: total, free, reserved beyond what is used, kept as headroom, and room for more",
        labels=["device", "name", "kind"],
    )
    held = GaugeMetricFamily(
        "ostler_memory_owner_bytes",
        "Memory that a worker uses, and reserves in all",
        labels=["device", "owner", "kind"],
    )
    for memory in [found["host"], *found["devices"]] if found["host"] else []:
        for key, kind in names.items():
            gauge.add_metric([memory["uuid"], memory["name"], kind], memory[key] * _MB)
        gauge.add_metric([memory["uuid"], memory["name"], "used"], (memory["total_mb"] - memory["free_mb"]) * _MB)
        for owner in memory["owners"]:
            held.add_metric([memory["uuid"], owner["owner"], "used"], owner["mb"] * _MB)
            held.add_metric([memory["uuid"], owner["owner"], "reserved"], owner["need_mb"] * _MB)
    waiting = GaugeMetricFamily("ostler_memory_waiting", "Workers that wait for memory", value=len(found["waiting"]))
    yield from (gauge, held, waiting)


def _buckets(bins: Sequence[int]) -> list[tuple[str, float]]:
    """Counted up to each bound, as Prometheus has them."""
    return [*zip([*map(str, map(float, BOUNDS)), "+Inf"], map(float, itertools.accumulate(bins)), strict=True)]
