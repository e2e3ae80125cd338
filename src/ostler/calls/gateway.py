"""The node's side of calls: the tenant of models' pools and of the data plane, and the go-between of the two.

The plane says which models are wanted and which have been idle for long enough; the supervisor starts and stops their workers,
and the plane hears where they serve. A warm call touches nothing of this.

    plane -> node                                          node -> plane
    ["want", task, model, replica]                         ["catalog", {access, max_body, tasks}]   at its start
    ["idle", task, model, replica, generation]             ["up", task, model, replica, generation, socket]
    ["closed", task, model, replica, generation]           ["down", task, model, replica, generation, reason, last lines]
    ["kill", task, model, replica, generation, why]        ["fail", task, model, reason, seconds | null]
    ["served", {component: calls}]                         ["close", task, model, replica, generation]
    ["kept" | "freed", task, model, replica, generation]   ["evict", task, model, replica, generation]
    ["facts", {…}]                                         ["state", task, model, replica, text]
    ["calls", rows, left out, tallies]    ended calls: see records.py
"""

from __future__ import annotations

import dataclasses
import json
import logging
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostler.calls.model import ModelOptions, ModelSpec, launch
from ostler.calls.records import CallLog
from ostler.config import Settings
from ostler.errors import OstlerError
from ostler.lifecycle.admission import Need
from ostler.lifecycle.state import Status
from ostler.lifecycle.ticket import Demand, Standing
from ostler.lifecycle.wire import Frame
from ostler.lifecycle.worker import Doing, Exit, Left, Nothing, PoolSpec, Slot, Worker
from ostler.store.footprints import Kind

if TYPE_CHECKING:
    from ostler.lifecycle.supervisor import Supervisor

log = logging.getLogger("ostler.calls")

PLANE = "plane"
_LINES = 20  # of a dead worker's log that its callers are told


def key_of(model: str, replica: int) -> str:
    """What a slot is for; ids may hold anything, so this is in no name of a file or a component."""
    return json.dumps([model, replica])


class Gateway:
    """All models of the node. `supervisor` is set by the runtime before anything starts."""

    def __init__(
        self,
        settings: Settings,
        models: Mapping[str, ModelSpec],
        target: str,
        run: Path,
        interpreter: Callable[[str | None], Path],
        access: Callable[[], dict[str, Any]],
        records: CallLog,
    ) -> None:
        self.records = records
        self._settings, self._models, self._target, self._run = settings, models, target, run
        self._interpreter, self._access = interpreter, access
        self.supervisor: Supervisor
        self._plane: Worker | None = None
        self._said: dict[str, str] = {}  # component -> why its model could not be loaded
        self._open: set[Worker] = set()  # workers in which the plane may still have calls
        self._was_up: set[Worker] = set()
        self._wanted: set[Slot] = set()  # since they were last up
        self.facts: dict[str, Any] = {}
        """What the plane last told of its models, by "task\\nmodel"."""

    # ---- pools

    def specs(self) -> list[PoolSpec]:
        """A pool on demand for each task."""
        return [self._spec(spec) for spec in self._models.values()]

    def _spec(self, spec: ModelSpec) -> PoolSpec:
        tenant = _Models(self, spec)
        settings = self._settings
        return PoolSpec(
            name=spec.name,
            size=0,
            argv=lambda slot: self._argv(spec, slot),
            given={"OSTLER_DATA": str(settings.data_dir)},
            cwd=spec.cwd,
            drain_signal=signal.SIGTERM,
            startup_deadline=max(o.startup for o in (spec.common, *spec.models.values())),
            stale_after=settings.stale_after,
            stop_grace=settings.stop_grace,
            term_grace=settings.term_grace,
            tenant=tenant,
            on_demand=True,
            need=_Memory(self, spec),
        )

    def _argv(self, spec: ModelSpec, slot: Slot) -> list[str]:
        model, _ = json.loads(slot.key or "[]")
        options = spec.options(model)
        python = str(self._interpreter(options.env))
        name = f"{spec.name}.{slot.number}.{slot.generation}.sock"
        return launch(
            python,
            self._target,
            spec.name,
            model,
            options,
            run=str(self._run),
            socket=name,
            max_body=self._settings.max_body,
        )

    # ---- the plane

    def plane_is_up(self, worker: Worker) -> None:
        """A plane begins (perhaps not the first): it learns everything that it needs."""
        self._plane = worker
        tasks = {
            name: {
                "models": {model: _terms(options) for model, options in spec.models.items()},
                "common": _terms(spec.common),
                "any_model": spec.any_model,
                "max_models": spec.max_models,
            }
            for name, spec in self._models.items()
        }
        worker.send("catalog", {"access": self._access(), "max_body": self._settings.max_body, "tasks": tasks})
        for slot in self._slots():
            if slot.worker is not None and slot.worker.accepting and slot.worker in self._was_up:
                self._say_up(slot.worker)

    def plane_is_gone(self, worker: Worker) -> None:
        """Its connections went with it, so nobody is in any worker."""
        if self._plane is worker:
            self._plane = None
            self._open.clear()
            self.facts = {}
            self.records.facts({})
            self.supervisor.wake()

    def heard(self, frame: Frame) -> None:
        """What the plane says."""
        match frame:
            case ["want", str(task), str(model), int(replica)]:
                self._want(task, model, replica)
            case ["idle", str(task), str(model), int(replica), int(generation)]:
                if worker := self._worker(task, model, replica, generation):
                    self._open.discard(worker)
                    self.supervisor.stop_slot(worker.slot, worker.pool.spec.stop_grace)
            case ["closed", str(task), str(model), int(replica), int(generation)]:
                if worker := self._worker(task, model, replica, generation):
                    self._open.discard(worker)
                    self.supervisor.wake()
            case ["kill", str(task), str(model), int(replica), int(generation), str(why)]:
                if worker := self._worker(task, model, replica, generation):
                    log.error("%s is killed: %s", worker.component, why)
                    self.supervisor.kill(worker, "call-deadline")
            case ["kept" | "freed" as answer, str(task), str(model), int(replica), int(generation)]:
                self._evicted(answer, self._worker(task, model, replica, generation))
            case ["served", dict(served)]:
                self._count(served)
            case ["facts", dict(facts)]:
                self.facts = facts
                self.records.facts(facts)
            case ["calls", list(rows), dict(left_out), list(tallies)]:
                self.records.take(rows, left_out, tallies)
            case _:
                log.warning("the data plane said something that is not understood: %r", frame[:1])

    def _say(self, *frame: object) -> None:
        self.records.said(frame)
        if self._plane is not None:
            self._plane.send(*frame)

    def _want(self, task: str, model: str, replica: int) -> None:
        spec = self._models.get(task)
        if spec is None:
            return
        if spec.is_server:
            self._say(
                "fail",
                task,
                model,
                "app.server is declared, but this version of ostler does not start servers yet",
                None,
            )
            return
        try:
            options = spec.options(model)
            self._interpreter(options.env)
        except OstlerError as error:
            self._say("fail", task, model, str(error), None if error.code == "NOT_FOUND" else 5.0)
            return
        slot = self.supervisor.open(task, key_of(model, replica))
        if slot.rest is Status.FAILED and slot.worker is None:
            self._say("fail", task, model, self._why_failed(slot), None)
            return
        self._wanted.add(slot)
        self.supervisor.start_slot(slot)

    def evict(self, worker: Worker) -> None:
        """Others need its memory. The plane knows whether anybody is in it, and lets nobody in when it says that it is free."""
        model, replica = json.loads(worker.slot.key or "[]")
        if self._plane is None:
            self._evicted("freed", worker)
        else:
            self._say("evict", worker.pool.spec.name, model, replica, worker.generation)

    def _evicted(self, answer: str, worker: Worker | None) -> None:
        if worker is None:
            return
        if answer == "freed":
            log.info("%s leaves: others need its memory", worker.component)
            self.records.evicted(worker)
            self._open.discard(worker)
            self.supervisor.stop_slot(worker.slot, worker.pool.spec.stop_grace)
        elif worker.ticket is not None:
            worker.ticket.kept()

    def waits(self, slot: Slot, why: str) -> None:
        model, replica = json.loads(slot.key or "[]")
        self._say("state", slot.pool.spec.name, model, replica, f"waiting for memory: {why}")

    def never_fits(self, slot: Slot, why: str) -> None:
        model, _ = json.loads(slot.key or "[]")
        self._wanted.discard(slot)
        self._say("fail", slot.pool.spec.name, model, why, 5.0)
        self.supervisor.stop_slot(slot)

    def in_flight(self, worker: Worker) -> int:
        """As the plane last told."""
        model, _ = json.loads(worker.slot.key or "[]")
        told = self.facts.get(f"{worker.pool.spec.name}\n{model}", {})
        return int(told.get("in_flight", 0))

    def _count(self, served: Mapping[str, Any]) -> None:
        for component, number in served.items():
            slot = self.supervisor.slots.get(component)
            if slot is not None and slot.worker is not None and isinstance(number, int):
                for _ in range(min(number, 1000)):
                    self.supervisor.finished(slot.worker, idle=False)

    # ---- workers, as their tenant hears of them

    def is_up(self, worker: Worker) -> None:
        self._was_up.add(worker)
        self.records.loaded(worker)
        self._wanted.discard(worker.slot)
        self._said.pop(worker.component, None)
        self._say_up(worker)

    def _say_up(self, worker: Worker) -> None:
        model, replica = json.loads(worker.slot.key or "[]")
        self._open.add(worker)
        self._say(
            "up",
            worker.pool.spec.name,
            model,
            replica,
            worker.generation,
            str(worker.info.get("socket", "")),
            worker.component,
        )

    def is_open(self, worker: Worker) -> bool:
        return self._plane is not None and worker in self._open

    def close(self, worker: Worker) -> None:
        """The worker leaves: no new calls; the plane says when the last one is over."""
        if self.is_open(worker):
            model, replica = json.loads(worker.slot.key or "[]")
            self._say("close", worker.pool.spec.name, model, replica, worker.generation)

    def loading(self, worker: Worker, fraction: float) -> None:
        """It makes progress, so its time to start begins anew."""
        worker.started = time.monotonic()
        model, replica = json.loads(worker.slot.key or "[]")
        self._say("state", worker.pool.spec.name, model, replica, f"loading {fraction:.0%}")

    def failed_to_load(self, worker: Worker, why: str) -> None:
        self._said[worker.component] = why

    def is_gone(self, worker: Worker, end: Exit) -> Left:
        model, replica = json.loads(worker.slot.key or "[]")
        self.records.gone(worker)
        served = worker in self._was_up
        self._was_up.discard(worker)
        self._open.discard(worker)
        tail = list(worker.process.tail)[-_LINES:] if worker.process else []
        where = (worker.pool.spec.name, model, replica, worker.generation)
        reason = self._said.get(worker.component) or _in_words(end)
        if end.kind != "crash" or served:
            self._say("down", *where, reason, tail)
        if end.kind != "crash":
            return Left()
        # What follows a crash is decided after this returns.
        self.supervisor.later(lambda: self._after_crash(worker.slot, where, reason, tail, served=served))
        # A worker that serves and dies had calls in hand as far as we know: bad input does not stop a model.
        return Left(f"call:{worker.component}:{worker.generation}" if served else None)

    def _after_crash(
        self, slot: Slot, where: tuple[str, str, int, int], reason: str, tail: list[str], *, served: bool
    ) -> None:
        """Who waits is told; the next call has it started again, when its time has come."""
        task, model, *_ = where
        if slot.rest is Status.FAILED and slot.worker is None:
            self._say("fail", task, model, self._why_failed(slot), None)
        elif not served:
            self._say("fail", task, model, f"it could not be started: {reason}", max(0.1, slot.due - time.monotonic()))
            self._wanted.discard(slot)
        if slot.worker is None and slot.rest is Status.CRASHED and slot not in self._wanted:
            self.supervisor.stop_slot(slot)  # … and start it where somebody asks for it
        if not served:
            self._say("down", *where, reason, tail)

    def _why_failed(self, slot: Slot) -> str:
        said = self._said.get(slot.component) or (slot.last_exit.reason if slot.last_exit else "")
        return f"{slot.component} has failed too often ({said}); 'ostler reset {slot.component}' lets it try again"

    def _slots(self) -> list[Slot]:
        return [slot for name in self._models for slot in self.supervisor.pools[name].slots]

    def _worker(self, task: str, model: str, replica: int, generation: int) -> Worker | None:
        if task not in self._models:
            return None
        key = key_of(model, replica)
        for slot in self.supervisor.pools[task].slots:
            if slot.key == key:
                return next((w for w in slot.all() if w.generation == generation), None)
        return None

    def states(self) -> dict[str, dict[str, Any]]:
        """The models as health shows them, from memory."""
        found = {}
        for name, spec in self._models.items():
            slots = {json.loads(s.key or "[]")[0]: s for s in self.supervisor.pools[name].slots}
            for model in dict.fromkeys([*spec.models, *slots]):
                state = self._state(slots.get(model), self.facts.get(f"{name}\n{model}", {}))
                found[f"{name}:{model}"] = {**state, "reason": self.records.reason(name, model)}
        return found

    def _state(self, slot: Slot | None, told: Mapping[str, Any]) -> dict[str, Any]:
        worker = slot.worker if slot else None
        if worker is None:
            state = "FAILED" if slot and slot.rest is Status.FAILED else "IDLE"
        elif worker.status is Status.STARTING:
            state = "STARTING"
        elif worker.accepting:
            state = "BUSY" if told.get("in_flight") else "READY"
        else:
            state = "TERMINATED"
        return {
            "state": state,
            "idle_seconds": self.records.since_told(told.get("idle_seconds")),
            "memory_mb": worker.rss_mb if worker else None,
            "socket": worker.info.get("socket") if worker else None,
            "in_flight": told.get("in_flight", 0),
            "waiting": told.get("waiting", 0),
            "worker": slot.component if slot else None,
        }


class _Models(Nothing):
    """The tenant of one task's pool."""

    kind = "calls"

    def __init__(self, gateway: Gateway, spec: ModelSpec) -> None:
        self._gateway, self._spec = gateway, spec

    def ready(self, worker: Worker, info: Mapping[str, Any]) -> None:
        self._gateway.is_up(worker)

    def heard(self, worker: Worker, frame: Frame) -> None:
        match frame:
            case ["loading", float() | int() as fraction]:
                self._gateway.loading(worker, float(fraction))
            case ["failed", str(why)]:
                self._gateway.failed_to_load(worker, why)

    def beat(self, worker: Worker, facts: Any) -> Any:
        gpu = facts.get("gpu_mb") if isinstance(facts, dict) else None
        if worker.ticket is not None and isinstance(gpu, (int, float)):
            worker.ticket.measured(Need(worker.rss_mb or 0.0, float(gpu)))

    def busy(self, worker: Worker) -> bool:
        return self._gateway.is_open(worker)

    def doing(self, worker: Worker) -> Doing | None:
        model, _ = json.loads(worker.slot.key or "[]")
        return Doing("", model) if worker.accepting else None

    def drain(self, worker: Worker) -> None:
        self._gateway.close(worker)

    def gone(self, worker: Worker, end: Exit) -> Left:
        return self._gateway.is_gone(worker, end)


class _Memory:
    """What the workers of one task need of memory."""

    def __init__(self, gateway: Gateway, spec: ModelSpec) -> None:
        self._gateway, self._spec = gateway, spec

    def _options(self, slot: Slot) -> tuple[str, ModelOptions]:
        model, _ = json.loads(slot.key or "[]")
        return model, self._spec.options(model)

    def demand(self, slot: Slot) -> Demand:
        model, options = self._options(slot)
        kind = Kind(self._spec.name, model, options.env or "")
        return Demand(Need(options.memory_mb, options.gpu_mb), kind=kind)

    def standing(self, worker: Worker) -> Standing:
        _, options = self._options(worker.slot)
        loaded = float(worker.info.get("load_ms", 1000.0)) / 1000
        return Standing(
            self._gateway.in_flight(worker) > 0,
            pinned=options.pinned,
            reload_s=max(0.1, loaded),
            use=1.0 + worker.served,
        )

    def evict(self, worker: Worker, short_of: str) -> bool:
        self._gateway.evict(worker)
        return True

    def waits(self, slot: Slot, why: str) -> None:
        self._gateway.waits(slot, why)

    def refused(self, slot: Slot, why: str) -> None:
        self._gateway.never_fits(slot, why)


class PlaneTenant(Nothing):
    """The tenant of the data plane's own pool."""

    kind = "plane"

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def ready(self, worker: Worker, info: Mapping[str, Any]) -> None:
        self._gateway.plane_is_up(worker)

    def heard(self, worker: Worker, frame: Frame) -> None:
        self._gateway.heard(frame)

    def gone(self, worker: Worker, end: Exit) -> Left:
        self._gateway.plane_is_gone(worker)
        return Left()


def _terms(options: ModelOptions) -> dict[str, Any]:
    """What the plane needs of a model's options."""
    known = dataclasses.asdict(options)
    return {
        name: known[name] for name in ("workers", "queue", "idle", "pinned", "timeout", "startup", "kill_on_cancel")
    } | {"room": options.connections}


def _in_words(end: Exit) -> str:
    return f"its worker ended ({end.reason}{f', {end.signal}' if end.signal else f', exit code {end.code}'})"
