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

import asyncio
import dataclasses
import json
import logging
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostler.calls import answer
from ostler.calls.model import ModelOptions, ModelSpec, launch
from ostler.calls.parking import NOT_ASKED, Parking
from ostler.calls.program import Program
from ostler.calls.records import CallLog
from ostler.calls.tenants import Memory, Models
from ostler.config import Settings
from ostler.errors import OstlerError
from ostler.lifecycle.admission import HOST
from ostler.lifecycle.listening import socket_name
from ostler.lifecycle.state import Status
from ostler.lifecycle.wire import Frame
from ostler.lifecycle.worker import Exit, Left, PoolSpec, Slot, Worker

if TYPE_CHECKING:
    from ostler.lifecycle.supervisor import Supervisor

log = logging.getLogger("ostler.calls")

PLANE = "plane"
_ANSWER = 5.0  # seconds in which the plane says whether a worker may go
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
        self._settings, self.models, self._target, self._run = settings, dict(models), target, run
        self._interpreter, self._access = interpreter, access
        self.supervisor: Supervisor
        self.parking = Parking(self, settings.parked_for)
        self._programs = {s.name: Program(s, run, interpreter) for s in models.values() if s.is_server}
        self._plane: Worker | None = None
        self._said: dict[str, str] = {}  # component -> why its model could not be loaded
        self._asked: dict[Worker, asyncio.Future[bool]] = {}  # who wants to know whether it goes
        self._short: dict[Worker, str] = {}  # who was told to go, and for which memory
        self._ran_out: set[Slot] = set()  # of memory while they loaded, since they were last up
        self._again: set[Slot] = set()  # … and are tried once more
        self._open: set[Worker] = set()  # workers in which the plane may still have calls
        self._was_up: set[Worker] = set()
        self._wanted: set[Slot] = set()  # since they were last up
        self.facts: dict[str, Any] = {}
        """What the plane last told of its models, by "task\\nmodel"."""
        self.plane_began: Callable[[], None] = lambda: None
        self.turn_is_taken = False  # in exclusive mode: a call has the GPUs

    # ---- pools

    def specs(self) -> list[PoolSpec]:
        """A pool on demand for each task."""
        return [self._spec(spec) for spec in self.models.values()]

    def _spec(self, spec: ModelSpec) -> PoolSpec:
        settings, program = self._settings, self._programs.get(spec.name)
        return PoolSpec(
            name=spec.name,
            size=0,
            argv=program.argv if program else lambda slot: self._argv(spec, slot),
            env=spec.variables,
            given={} if program else {"OSTLER_DATA": str(settings.data_dir)},
            fills=program.fills if program else lambda _: {},
            cwd=spec.cwd,
            probe=program.probe() if program else None,
            drain_signal=signal.SIGTERM,
            startup_deadline=lambda slot: self._options(slot).startup,
            stale_after=settings.stale_after,
            stop_grace=settings.stop_grace,
            term_grace=settings.term_grace,
            tenant=Models(self),
            on_demand=True,
            outlasts=1,  # jobs that finish may call it
            need=Memory(self, spec.name),
        )

    def _argv(self, spec: ModelSpec, slot: Slot) -> list[str]:
        model, _ = json.loads(slot.key or "[]")
        options = spec.options(model)
        python = str(self._interpreter(options.env))
        return launch(
            python,
            self._target,
            spec.name,
            model,
            options,
            run=str(self._run),
            socket=socket_name(spec.name, slot, slot.generation),
            max_body=self._settings.max_body,
        )

    def unavailable(self, task: str, model: str) -> str | None:
        """Why the model cannot be started as things are: its environment, its program or one of its files is not there."""
        spec = self.models[task]
        try:
            self._interpreter(spec.options(model).env)
            if program := self._programs.get(task):
                program.check(model)
        except OstlerError as error:
            return str(error)
        path = spec.missing(model)
        return f"its file {path} does not exist" if path else None

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
        self._say("catalog", {**told, "tasks": tasks})

    def tell_peers(self, told: dict[str, Any]) -> bool:
        """What other nodes have; False while there is no plane to tell."""
        self._say("peers", told)
        return self._plane is not None

    def plane_is_gone(self, worker: Worker) -> None:
        """Its connections went with it, so nobody is in any worker."""
        if self._plane is worker:
            self._plane = None
            self._open.clear()
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
                    self._open.discard(worker)
                    if not self.parking.begin(worker, hurried=False):
                        self.end(worker)
            case ["closed", str(task), str(model), int(replica), int(generation)]:
                if worker := self._worker(task, model, replica, generation):
                    self._open.discard(worker)
                    self.supervisor.wake()
            case ["kill", str(task), str(model), int(replica), int(generation), str(reason), str(why)]:
                if worker := self._worker(task, model, replica, generation):
                    self._kill(worker, reason, why)
            case ["kept" | "freed" as said, str(task), str(model), int(replica), int(generation)]:
                self._evicted(said, self._worker(task, model, replica, generation))
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

    def _say(self, *frame: object) -> None:
        self.records.said(frame)
        if self._plane is not None:
            self._plane.send(*frame)

    def want(self, task: str, model: str, replica: int) -> None:
        """Somebody waits for it: have it started, or woken; or say why it cannot be had."""
        spec = self.models.get(task)
        if spec is None:
            return
        if why := self.unavailable(task, model):
            self._say("fail", task, model, f"it is unavailable: {why}", 1.0)
            return
        slot = self.supervisor.open(task, key_of(model, replica))
        if slot.rest is Status.FAILED and slot.worker is None:
            self._say("fail", task, model, self.why_failed(slot), None)
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

    async def unload(self, slot: Slot) -> bool:
        """Have its worker leave, if nobody is in it: the plane knows. Whether it goes."""
        worker = slot.worker
        if worker is None or not worker.accepting:
            self.supervisor.stop_slot(slot)
            return True
        if worker in self.parking.states:
            self.parking.end(worker)
            return True
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._asked[worker] = answer
        self.evict(worker, HOST)
        try:
            async with asyncio.timeout(_ANSWER):
                return await answer
        except TimeoutError:
            return False

    def end(self, worker: Worker) -> None:
        """Nobody is in it and nobody wants it."""
        self.supervisor.stop_slot(worker.slot, worker.pool.spec.stop_grace)

    def evict(self, worker: Worker, short_of: str) -> None:
        """Others need its memory. The plane knows whether anybody is in it, and lets nobody in when it says that it is free."""
        if self.parking.evict(worker, short_of):
            return
        self._short[worker] = short_of
        model, replica = json.loads(worker.slot.key or "[]")
        if self._plane is None:
            self._evicted("freed", worker)
        else:
            self._say("evict", worker.pool.spec.name, model, replica, worker.generation)

    def _evicted(self, said: str, worker: Worker | None) -> None:
        if worker is None:
            return
        short_of = self._short.pop(worker, HOST)
        if (asked := self._asked.pop(worker, None)) and not asked.done():
            asked.set_result(said == "freed")
        if said == "freed":
            self.records.evicted(worker)
            self._open.discard(worker)
            if short_of == HOST or not self.parking.begin(worker, hurried=True):
                log.info("%s is unloaded, because others need its memory", worker.component)
                self.end(worker)
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

    def gpu_lock(self) -> bool | None:
        """In exclusive mode: whether a call has the GPUs now, or a model loads. None in the other."""
        ledger = self.supervisor.ledger
        if not self._settings.gpu_exclusive:
            return None
        return self.turn_is_taken or (ledger is not None and ledger.operating() is not None)

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
        self._ran_out.discard(worker.slot)
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
            self.address(worker),
            worker.component,
        )

    def address(self, worker: Worker) -> str:
        """Where it is called: the name of a socket in the run directory, or `tcp:PORT`."""
        program = self._programs.get(worker.pool.spec.name)
        return program.address(worker) if program else str(worker.info.get("socket", ""))

    def is_parked(self, worker: Worker) -> None:
        """As far as the plane knows it is gone; when it is wanted, it is woken."""
        model, replica = json.loads(worker.slot.key or "[]")
        self._say("down", worker.pool.spec.name, model, replica, worker.generation, "it was parked", [])

    def is_awake(self, worker: Worker) -> None:
        """It was parked, or could not be parked and is wanted."""
        if worker.accepting:
            self._say_up(worker)

    def is_open(self, worker: Worker) -> bool:
        return self._plane is not None and worker in self._open

    def close(self, worker: Worker) -> None:
        """The worker leaves: no new calls; the plane says when the last one is over."""
        self.parking.end(worker)
        if self.is_open(worker):
            model, replica = json.loads(worker.slot.key or "[]")
            self._say("close", worker.pool.spec.name, model, replica, worker.generation)

    def loading(self, worker: Worker, fraction: float) -> None:
        """It makes progress, so its time to start begins anew."""
        worker.started = time.monotonic()
        model, replica = json.loads(worker.slot.key or "[]")
        self._say("state", worker.pool.spec.name, model, replica, f"loading {fraction:.0%}")

    def failed_to_load(self, worker: Worker, why: str) -> None:
        """Its last words. Where it had too little memory, it is tried once more with more of it, before anybody is told."""
        self._said[worker.component] = why
        if answer.is_out_of_memory(why) and worker.ticket is not None:
            worker.ticket.ran_out(worker.ticket.device or HOST)
            if worker.slot not in self._ran_out:
                self._ran_out.add(worker.slot)
                self._again.add(worker.slot)

    def is_gone(self, worker: Worker, end: Exit) -> Left:
        model, replica = json.loads(worker.slot.key or "[]")
        self.records.gone(worker)
        served = worker in self._was_up
        self._was_up.discard(worker)
        self._open.discard(worker)
        self._short.pop(worker, None)
        if (asked := self._asked.pop(worker, None)) and not asked.done():
            asked.set_result(True)
        self.parking.gone(worker)
        if program := self._programs.get(worker.pool.spec.name):
            program.ended(worker)
        tail = list(worker.process.tail)[-_LINES:] if worker.process else []
        where = (worker.pool.spec.name, model, replica, worker.generation)
        reason = self._said.get(worker.component) or _in_words(end)
        if end.kind != "crash" or served:
            self._say("down", *where, reason, tail)
        if end.kind != "crash":
            if end.reason == "killed" and worker.slot not in self._wanted and not self._options(worker.slot).pinned:
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
            self._say("fail", task, model, self.why_failed(slot), None)
        elif not served and not again:
            self._say("fail", task, model, f"it could not be started: {reason}", max(0.1, slot.due - time.monotonic()))
            self._wanted.discard(slot)
        if (
            slot.worker is None
            and slot.rest is Status.CRASHED
            and slot not in self._wanted
            and not self._options(slot).pinned
        ):
            self.supervisor.stop_slot(slot)  # … and start it where somebody asks for it
        if not served and not again:
            self._say("down", *where, reason, tail)

    def why_failed(self, slot: Slot) -> str:
        said = self._said.get(slot.component) or (slot.last_exit.reason if slot.last_exit else "")
        return f"{slot.component} has failed too often ({said}); run 'ostler reset {slot.component}' to try again"

    def slots_of(self, task: str) -> dict[str, list[Slot]]:
        """The slots of a task, by model id."""
        found: dict[str, list[Slot]] = {model: [] for model in self.models[task].models}
        for slot in self.supervisor.pools[task].slots:
            found.setdefault(json.loads(slot.key or "[]")[0], []).append(slot)
        return found

    def _options(self, slot: Slot) -> ModelOptions:
        model, _ = json.loads(slot.key or "[]")
        return self.models[slot.pool.spec.name].options(model)

    def options_of(self, worker: Worker) -> ModelOptions:
        """How the worker's model is run."""
        return self._options(worker.slot)

    def _slots(self) -> list[Slot]:
        return [slot for name in self.models for slot in self.supervisor.pools[name].slots]

    def _worker(self, task: str, model: str, replica: int, generation: int) -> Worker | None:
        if task not in self.models:
            return None
        key = key_of(model, replica)
        for slot in self.supervisor.pools[task].slots:
            if slot.key == key:
                return next((w for w in slot.all() if w.generation == generation), None)
        return None


def _terms(options: ModelOptions) -> dict[str, Any]:
    """What the plane needs of a model's options."""
    known = dataclasses.asdict(options)
    return {
        name: known[name] for name in ("workers", "queue", "idle", "pinned", "timeout", "startup", "kill_on_cancel")
    } | {"room": options.connections, "gpu": options.gpu_mb > 0}


def _in_words(end: Exit) -> str:
    return f"its worker ended ({end.reason}{f', {end.signal}' if end.signal else f', exit code {end.code}'})"
