"""The node's side of the call log: what the plane tells of ended calls goes to the store, and is added up for metrics and plots."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ostler.calls.model import ModelSpec
from ostler.calls.replica import model_of, slot_of
from ostler.calls.tally import Tally, percentile
from ostler.events import Bus, CallsTouched
from ostler.lifecycle.worker import Pool, Slot, Worker
from ostler.store.calls import OUTCOMES, CallRow
from ostler.store.lanes import Lane

log = logging.getLogger("ostler.calls")

OTHER = "other"
_LABELS = 50  # models of one task that are counted by their own id, beside those that it lists
_HELD = 5_000  # rows that wait for the store
_GONE = 256  # workers whose peaks are remembered after their end
STEP, _STEPS = 10, 61  # seconds of a bucket for the plots, and how many there are

Label = tuple[str, str]  # task, and model or OTHER


class Bucket:
    """Ten seconds of one model."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.in_flight = self.waiting = 0  # the most that were told


class Counters:
    """What happened to one model since the node started."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.loads = self.evictions = 0
        self.load_s = 0.0
        self.buckets: dict[int, Bucket] = {}  # by the second in which they begin

    def bucket(self, now: float) -> Bucket:
        at = int(now) - int(now) % STEP
        found = self.buckets.get(at)
        if found is None:
            found = self.buckets[at] = Bucket()
            while len(self.buckets) > _STEPS:
                del self.buckets[min(self.buckets)]
        return found


class CallLog:
    """Takes the plane's reports. A part of the node: its stop writes what is left. `pools` is set by the runtime."""

    def __init__(self, models: Mapping[str, ModelSpec], lane: Lane, bus: Bus, node: Callable[[], str]) -> None:
        self._models, self._lane, self._bus, self._node = models, lane, bus, node
        self.pools: Mapping[str, Pool] = {}
        self.counters: dict[Label, Counters] = {}
        self.left_out: dict[str, int] = {}
        """Calls that are counted and not in the log, by outcome; `failed` stands for all but done and refused."""
        self._labels: dict[str, set[str]] = {}
        self._rows: list[CallRow] = []
        self._last_id = 0
        self._gone: dict[tuple[str, int], tuple[float | None, float | None]] = {}
        self._reasons: dict[tuple[str, str], tuple[str, str]] = {}  # of a model: the kind of news, and its words
        self._told_at = time.monotonic()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._write(), name="call log")

    async def stop(self) -> None:
        """Hand over what is left; the lane finishes it."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if rows := self._rows:
            self._rows = []
            self._lane.post(lambda store: store.calls.add(rows))

    # ---- what the plane says

    def take(self, rows: Sequence[Sequence[Any]], left_out: Mapping[str, int], tallies: Sequence[Any]) -> None:
        """A report: rows for the log, how many were left out, and what all of them come to."""
        now = time.time()
        for task, model, frame in tallies:
            counters = self.of(task, model)
            counters.tally.merge(frame)
            counters.bucket(now).tally.merge(frame)
        for kind, n in left_out.items():
            self._leave_out(kind, n)
        for row in rows:
            if len(self._rows) < _HELD:
                self._rows.append(self._row(row))
            else:
                self._leave_out(row[11] if row[11] in ("done", "refused") else "failed", 1)
        self._news.set()
        self._bus.send(CallsTouched())

    def facts(self, facts: Mapping[str, Mapping[str, Any]]) -> None:
        """How many calls of each model are under way and wait."""
        now, self._told_at = time.time(), time.monotonic()
        for name, told in facts.items():
            if told.get("in_flight") or told.get("waiting"):
                bucket = self.of(*name.split("\n", 1)).bucket(now)
                bucket.in_flight = max(bucket.in_flight, told["in_flight"])
                bucket.waiting = max(bucket.waiting, told["waiting"])
        self._bus.send(CallsTouched())

    def _leave_out(self, kind: str, n: int) -> None:
        self.left_out[kind] = self.left_out.get(kind, 0) + n

    def _row(self, told: Sequence[Any]) -> CallRow:
        request, task, model, replica, generation, *measured = told
        slot = self._slot(task, model, replica)
        component = None if slot is None else slot.component
        host, gpu = self._peaks(slot, generation)
        self._last_id = max(self._last_id + 1, time.time_ns() // 1000)
        return CallRow._make([self._last_id, self._node(), request, task, model, component, *measured, host, gpu])

    def _slot(self, task: str, model: str, replica: int) -> Slot | None:
        pool = self.pools.get(task)
        return slot_of(pool, model, replica) if pool else None

    def slots(self, task: str, model: str) -> list[Slot]:
        """The workers' slots of a model that were ever opened."""
        pool = self.pools.get(task)
        return [slot for slot in pool.slots if model_of(slot) == model] if pool else []

    # ---- what the gateway says

    def loaded(self, worker: Worker) -> None:
        """A worker is up."""
        counters = self.of(worker.pool.spec.name, model_of(worker.slot))
        counters.loads += 1
        counters.load_s += float(worker.info.get("load_ms") or 0) / 1000

    def evicted(self, worker: Worker) -> None:
        """A worker leaves, because others need its memory."""
        self.of(worker.pool.spec.name, model_of(worker.slot)).evictions += 1

    def gone(self, worker: Worker) -> None:
        """A worker has ended. Calls that were in it are told of later, and want to know its peaks."""
        self._gone[worker.component, worker.generation] = _peaks(worker)
        while len(self._gone) > _GONE:
            del self._gone[next(iter(self._gone))]

    def said(self, frame: Sequence[Any]) -> None:
        """The gateway says this to the plane: why a model is not there yet, or cannot be had."""
        match frame:
            case ["state", str(task), str(model), _, str(words)]:
                self._reasons[task, model] = ("state", words)
            case ["fail", str(task), str(model), str(words), *_] if not words.startswith("it is unavailable"):
                # (whether something is missing is looked up when the state is asked for)
                self._reasons[task, model] = ("fail", words)
            case ["up", str(task), str(model), *_]:
                self._reasons.pop((task, model), None)
            case ["down", str(task), str(model), *_] if self._reasons.get((task, model), ("",))[0] == "state":
                del self._reasons[task, model]
            case _:
                return
        self._bus.send(CallsTouched())

    def reason(self, task: str, model: str) -> str | None:
        """Why the model is not there; None: there is nothing to say."""
        return self._reasons.get((task, model), (None, None))[1]

    def _peaks(self, slot: Slot | None, generation: int) -> tuple[float | None, float | None]:
        if slot is None:
            return None, None
        worker = next((w for w in slot.all() if w.generation == generation), None)
        return self._gone.get((slot.component, generation), (None, None)) if worker is None else _peaks(worker)

    # ---- what others see

    def of(self, task: str, model: str) -> Counters:
        """The counters of a model; those of ids that a task does not list are shared beyond a number of them."""
        label = (task, self.label(task, model))
        found = self.counters.get(label)
        if found is None:
            found = self.counters[label] = Counters()
        return found

    def label(self, task: str, model: str) -> str:
        spec = self._models.get(task)
        if spec is not None and model in spec.models:
            return model
        known = self._labels.setdefault(task, set())
        if model not in known and len(known) >= _LABELS:
            return OTHER
        known.add(model)
        return model

    def since_told(self, seconds: float | None) -> float | None:
        """What the plane told in seconds that go on: it tells nothing while nothing happens."""
        return None if seconds is None else round(seconds + time.monotonic() - self._told_at, 1)

    def tasks(self) -> list[dict[str, Any]]:
        """What can be called."""
        return [
            {"task": name, "models": [*spec.models], "any_model": spec.any_model} for name, spec in self._models.items()
        ]

    def spoken(self) -> set[str]:
        """The methods with which models answer OpenAI's routes. What a server program answers is not known."""
        return {method for spec in self._models.values() if not spec.is_server for method in spec.speaks}

    def series(self, task: str | None, model: str | None) -> list[dict[str, Any]]:
        """The last ten minutes in steps of ten seconds that have anything in them, oldest first."""
        found: dict[int, Bucket] = {}
        oldest = time.time() - STEP * _STEPS
        for (of_task, of_model), counters in self.counters.items():
            if task not in (None, of_task) or model not in (None, of_model):
                continue
            for at, bucket in counters.buckets.items():
                if at >= oldest:
                    total = found.setdefault(at, Bucket())
                    total.tally.merge(bucket.tally.frame())
                    total.in_flight += bucket.in_flight
                    total.waiting += bucket.waiting
        return [_point(at, found[at]) for at in sorted(found)]

    # ---- writing

    async def _write(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            rows, self._rows = self._rows, []
            if not rows:
                continue
            try:
                await self._lane.call(lambda store, rows=rows: store.calls.add(rows))  # type: ignore[misc]
            except asyncio.CancelledError:
                raise  # the lane has them all the same
            except Exception:
                log.exception("%d calls could not be written to the log", len(rows))


def _peaks(worker: Worker) -> tuple[float | None, float | None]:
    """The most memory that a worker was seen to use, of the host and of its GPU, in MB."""
    ticket = worker.ticket
    host = max(
        worker.rss_mb or 0.0,
        worker.process.peak_rss_mb if worker.process else 0.0,
        ticket.peak.host_mb if ticket else 0.0,
    )
    gpu = ticket.peak.gpu_mb if ticket else 0.0
    return round(host, 1) or None, round(gpu, 1) or None


def _point(at: int, bucket: Bucket) -> dict[str, Any]:
    tally = bucket.tally
    return {
        "at": at * 1000,
        "step": STEP,
        **{outcome: tally.outcomes.get(outcome, 0) for outcome in OUTCOMES},
        "took_p50": percentile(tally.took, 0.5),
        "took_p95": percentile(tally.took, 0.95),
        "waited_p95": percentile(tally.waited, 0.95),
        "in_flight": bucket.in_flight,
        "waiting": bucket.waiting,
    }
