"""The node's side of calls: the tenant of models' pools and of the data plane, and the go-between of the two.

The plane says which models are wanted and which have been idle for long enough; the supervisor starts and stops their workers,
and the plane hears where they serve. A warm call touches nothing of this.

    plane -> node                                          node -> plane
    ["want", task, model, replica]                         ["catalog", {access, max_body, exclusive, tasks}]   at its start and on change
    ["idle", task, model, replica, generation]             ["up", task, model, replica, generation, socket]
    ["closed", task, model, replica, generation]           ["down", task, model, replica, generation, reason, last lines]
    ["kill", task, model, replica, generation, reason, why]   ["fail", task, model, reason, seconds | null]
    ["served", {component: calls}]                         ["close", task, model, replica, generation]
    ["kept" | "freed", task, model, replica, generation]   ["evict", task, model, replica, generation]
    ["facts", {…}, whether a call has its turn]            ["state", task, model, replica, text]
    ["calls", rows, left out, tallies]                     ["peers", {own, secret, here, peers}]    see places.py
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostler.calls import answer
from ostler.calls.eviction import Evictions
from ostler.calls.launch import Launches
from ostler.calls.model import ModelOptions, ModelSpec
from ostler.calls.parking import NOT_ASKED, Parking
from ostler.calls.records import CallLog
from ostler.calls.replica import key_of, model_of, place_of, slot_of
from ostler.config import Settings
from ostler.lifecycle.admission import HOST
from ostler.lifecycle.state import Status
from ostler.lifecycle.wire import Frame
from ostler.lifecycle.worker import Exit, Left, PoolSpec, Slot, Worker

if TYPE_CHECKING:
    from ostler.lifecycle.supervisor import Supervisor

log = logging.getLogger("ostler.calls")

_LINES = 20  # of a dead worker's log that its callers are told


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
        self._settings, self.models, self._access = settings, dict(models), access
        self.launches = Launches(settings, self.models, target, run, interpreter)
        self.supervisor: Supervisor
        self.parking, self.evictions = Parking(self, settings.parked_for), Evictions(self)
        self._plane: Worker | None = None
        self._said: dict[str, str] = {}  # component -> why its model could not be loaded
        self._ran_out: set[Slot] = set()  # of memory while they loaded, since they were last up
        self._again: set[Slot] = set()  # … and are tried once more
        self.occupied: set[Worker] = set()  # workers in which the plane may still have calls
        self._was_up: set[Worker] = set()
        self._wanted: set[Slot] = set()  # since they were last up
        self.facts: dict[str, Any] = {}
        """What the plane last told of its models, by "task\\nmodel"."""
        self.plane_began: Callable[[], None] = lambda: None
        self.turn_is_taken = False  # in exclusive mode: a call has the GPUs

    # ---- pools

    def specs(self) -> list[PoolSpec]:
        """A pool on demand for each task."""
        return self.launches.pool_specs(self)

    # ---- the plane

    def plane_is_up(self, worker: Worker) -> None:
        """A plane begins (perhaps not the first): it learns everything that it needs."""
        self._plane = worker
        self.plane_began()
        self.tell_catalog()
        for slot in self._slots():
            serving = slot.worker
            if serving is not None and serving.accepting and serving in self._was_up - self.parking.states.keys():
                self._say_up(serving)
        self._preload()
        if self.parking.driver == NOT_ASKED and any(o.gpu_mb for s in self.models.values() for o in s.models.values()):
            self.supervisor.spawn_task(self.parking.look(), "parking")

    def tell_catalog(self) -> None:
        """What there is to call, and on which terms; again when these change."""
        tasks = {
            name: {
                "models": {model: _terms(options) for model, options in spec.models.items()},
                "common": _terms(spec.common),
                "any_model": spec.any_model,
                "max_models": spec.max_models,
                "path": spec.path if spec.is_server else None,
                "speaks": spec.speaks,
            }
            for name, spec in self.models.items()
        }
        told = {
            "access": self._access(),
            "max_body": self._settings.max_body,
            "exclusive": self._settings.gpu_exclusive,
        }
        self.say("catalog", {**told, "tasks": tasks})

    def tell_peers(self, told: dict[str, Any]) -> bool:
        """What other nodes have; False while there is no plane to tell."""
        return self.say("peers", told)

    def plane_is_gone(self, worker: Worker) -> None:
        """Its connections went with it, so nobody is in any worker."""
        if self._plane is worker:
            self._plane = None
            self.occupied.clear()
            self.facts = {}
            if self.supervisor.stopping:
                self.parking.close()
            self.records.facts({})
            self.supervisor.wake()

    def heard(self, frame: Frame) -> None:
        """What the plane says."""
        match frame:
            case ["want", str(task), str(model), int(replica)]:
                self.want(task, model, replica)
            case ["idle", str(task), str(model), int(replica), int(generation)]:
                if worker := self._worker(task, model, replica, generation):
                    self.occupied.discard(worker)
                    if not self.parking.begin(worker, hurried=False):
                        self.end(worker)
            case ["closed", str(task), str(model), int(replica), int(generation)]:
                if worker := self._worker(task, model, replica, generation):
                    self.occupied.discard(worker)
                    self.supervisor.wake()
            case ["kill", str(task), str(model), int(replica), int(generation), str(reason), str(why)]:
                if worker := self._worker(task, model, replica, generation):
                    self._kill(worker, reason, why)
            case ["kept" | "freed" as said, str(task), str(model), int(replica), int(generation)]:
                if worker := self._worker(task, model, replica, generation):
                    self.evictions.answered(said, worker)
            case ["served", dict(served)]:
                self._count(served)
            case ["facts", dict(facts), bool(turn)]:
                self.facts, self.turn_is_taken = facts, turn
                self.records.facts(facts)
            case ["calls", list(rows), dict(left_out), list(tallies)]:
                self.records.take(rows, left_out, tallies)
            case _:
                log.warning("unknown message from the data plane: %r", frame[:1])

    def _kill(self, worker: Worker, reason: str, why: str) -> None:
        """A call is stuck in it. That a caller has cancelled says nothing against the model, and nobody wants another one for it."""
        log.error("killing %s: %s", worker.component, why)
        cancelled = reason == "call-cancelled"
        if cancelled:
            self.supervisor.stop_slot(worker.slot)
        self.supervisor.kill(worker, reason, on_purpose=cancelled)

    def say(self, *frame: object) -> bool:
        """Tell the plane; False while there is none."""
        self.records.said(frame)
        if self._plane is not None:
            self._plane.send(*frame)
        return self._plane is not None

    def want(self, task: str, model: str, replica: int) -> None:
        """Somebody waits for it: have it started, or woken; or say why it cannot be had."""
        spec = self.models.get(task)
        if spec is None:
            return
        if why := self.launches.unavailable(task, model):
            self.say("fail", task, model, f"it is unavailable: {why}", 1.0)
            return
        slot = self.supervisor.open(task, key_of(model, replica))
        if slot.rest is Status.FAILED and slot.worker is None:
            self.say("fail", task, model, self.why_failed(slot), None)
            return
        self._wanted.add(slot)
        self.supervisor.start_slot(slot)
        if slot.worker is not None and self.parking.wake(slot.worker):
            self._wanted.discard(slot)

    def _preload(self) -> None:
        """Those that are to be there before anybody calls."""
        for task, spec in self.models.items():
            for model, options in spec.models.items():
                for replica in range(options.workers if options.preload or options.pinned else 0):
                    self.want(task, model, replica)

    def end(self, worker: Worker) -> None:
        """Nobody is in it and nobody wants it."""
        self.supervisor.stop_slot(worker.slot, worker.pool.spec.stop_grace)

    def waits(self, slot: Slot, why: str) -> None:
        self.say("state", *place_of(slot), f"waiting for memory: {why}")

    def never_fits(self, slot: Slot, why: str) -> None:
        self._wanted.discard(slot)
        self.say("fail", slot.pool.spec.name, model_of(slot), why, 5.0)
        self.supervisor.stop_slot(slot)

    def gpu_lock(self) -> bool | None:
        """In exclusive mode: whether a call has the GPUs now, or a model loads. None in the other."""
        ledger = self.supervisor.ledger
        if not self._settings.gpu_exclusive:
            return None
        return self.turn_is_taken or (ledger is not None and ledger.operating() is not None)

    def in_flight(self, worker: Worker) -> int:
        """As the plane last told."""
        told = self.facts.get(f"{worker.pool.spec.name}\n{model_of(worker.slot)}", {})
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
        self._ran_out.discard(worker.slot)
        self._said.pop(worker.component, None)
        self._say_up(worker)

    def _say_up(self, worker: Worker) -> None:
        self.occupied.add(worker)
        self.say("up", *place_of(worker.slot), worker.generation, self.launches.address(worker), worker.component)

    def is_parked(self, worker: Worker) -> None:
        """As far as the plane knows it is gone; when it is wanted, it is woken."""
        self.say("down", *place_of(worker.slot), worker.generation, "it was parked", [])

    def is_awake(self, worker: Worker) -> None:
        """It was parked, or could not be parked and is wanted."""
        if worker.accepting:
            self._say_up(worker)

    def is_open(self, worker: Worker) -> bool:
        return self._plane is not None and worker in self.occupied

    def close(self, worker: Worker) -> None:
        """The worker leaves: no new calls; the plane says when the last one is over."""
        self.parking.end(worker)
        if self.is_open(worker):
            self.say("close", *place_of(worker.slot), worker.generation)

    def loading(self, worker: Worker, fraction: float) -> None:
        """It makes progress, so its time to start begins anew."""
        worker.started = time.monotonic()
        self.say("state", *place_of(worker.slot), f"loading {fraction:.0%}")

    def failed_to_load(self, worker: Worker, why: str) -> None:
        """Its last words. Where it had too little memory, it is tried once more with more of it, before anybody is told."""
        self._said[worker.component] = why
        if answer.is_out_of_memory(why) and worker.ticket is not None:
            worker.ticket.ran_out(worker.ticket.device or HOST)
            if worker.slot not in self._ran_out:
                self._ran_out.add(worker.slot)
                self._again.add(worker.slot)

    def is_gone(self, worker: Worker, end: Exit) -> Left:
        self.records.gone(worker)
        served = worker in self._was_up
        self._was_up.discard(worker)
        self.occupied.discard(worker)
        self.evictions.over(worker, goes=True)
        self.parking.gone(worker)
        self.launches.removed(worker)
        tail = list(worker.process.tail)[-_LINES:] if worker.process else []
        where = *place_of(worker.slot), worker.generation
        reason = self._said.get(worker.component) or _in_words(end)
        if end.kind != "crash" or served:
            self.say("down", *where, reason, tail)
        if end.kind != "crash":
            if end.reason == "killed" and worker.slot not in self._wanted and not self.options_of(worker.slot).pinned:
                worker.slot.wanted = False  # the next call has it started again
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
        again = slot in self._again
        self._again.discard(slot)
        if slot.rest is Status.FAILED and slot.worker is None:
            self.say("fail", task, model, self.why_failed(slot), None)
        elif not served and not again:
            self.say("fail", task, model, f"it could not be started: {reason}", max(0.1, slot.due - time.monotonic()))
            self._wanted.discard(slot)
        if (
            slot.worker is None
            and slot.rest is Status.CRASHED
            and slot not in self._wanted
            and not self.options_of(slot).pinned
        ):
            self.supervisor.stop_slot(slot)  # … and start it where somebody asks for it
        if not served and not again:
            self.say("down", *where, reason, tail)

    def why_failed(self, slot: Slot) -> str:
        said = self._said.get(slot.component) or (slot.last_exit.reason if slot.last_exit else "")
        return f"{slot.component} has failed too often ({said}); run 'ostler reset {slot.component}' to try again"

    def slots_of(self, task: str) -> dict[str, list[Slot]]:
        """The slots of a task, by model id."""
        found: dict[str, list[Slot]] = {model: [] for model in self.models[task].models}
        for slot in self.supervisor.pools[task].slots:
            found.setdefault(model_of(slot), []).append(slot)
        return found

    def options_of(self, slot: Slot) -> ModelOptions:
        """How the slot's model is run."""
        return self.models[slot.pool.spec.name].options(model_of(slot))

    def _slots(self) -> list[Slot]:
        return [slot for name in self.models for slot in self.supervisor.pools[name].slots]

    def _worker(self, task: str, model: str, replica: int, generation: int) -> Worker | None:
        if task not in self.models:
            return None
        slot = slot_of(self.supervisor.pools[task], model, replica)
        return next((w for w in slot.all() if w.generation == generation), None) if slot else None


def _terms(options: ModelOptions) -> dict[str, Any]:
    """What the plane needs of a model's options."""
    known = dataclasses.asdict(options)
    return {
        name: known[name] for name in ("workers", "queue", "idle", "pinned", "timeout", "startup", "kill_on_cancel")
    } | {"room": options.connections, "gpu": options.gpu_mb > 0}


def _in_words(end: Exit) -> str:
    return f"its worker ended ({end.reason}{f', {end.signal}' if end.signal else f', exit code {end.code}'})"
