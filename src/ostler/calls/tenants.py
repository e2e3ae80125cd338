"""What the lifecycle tells of models' workers and of the data plane, and what it asks: both go to the gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ostler.calls.replica import model_of
from ostler.lifecycle.admission import Need
from ostler.lifecycle.ticket import Demand, Standing
from ostler.lifecycle.wire import Frame
from ostler.lifecycle.worker import Doing, Exit, Left, Nothing, Slot, Worker
from ostler.store.footprints import Kind

if TYPE_CHECKING:
    from ostler.calls.gateway import Gateway


class Models(Nothing):
    """The tenant of one task's pool."""

    kind = "calls"

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def ready(self, worker: Worker, info: Mapping[str, Any]) -> None:
        self._gateway.is_up(worker)

    def heard(self, worker: Worker, frame: Frame) -> None:
        match frame:
            case ["loading", float() | int() as fraction]:
                self._gateway.loading(worker, float(fraction))
            case ["failed", str(why)]:
                self._gateway.failed_to_load(worker, why)
            case ["parked", int() | float() as ms]:
                self._gateway.parking.parked(worker, ms / 1000)
            case ["woken", int() | float() as ms]:
                self._gateway.parking.woken(worker, ms / 1000)
            case ["trouble", str(which), str(why)]:
                self._gateway.parking.failed(worker, which, why)

    def beat(self, worker: Worker, facts: Any) -> Any:
        gpu = facts.get("gpu_mb") if isinstance(facts, dict) else None
        if worker.ticket is not None and isinstance(gpu, (int, float)):
            worker.ticket.measured(Need(worker.rss_mb or 0.0, float(gpu)))

    def busy(self, worker: Worker) -> bool:
        return self._gateway.is_open(worker)

    def doing(self, worker: Worker) -> Doing | None:
        return Doing("", model_of(worker.slot)) if worker.accepting else None

    def drain(self, worker: Worker) -> None:
        self._gateway.close(worker)

    def gone(self, worker: Worker, end: Exit) -> Left:
        return self._gateway.is_gone(worker, end)


class Memory:
    """What the workers of one task need of memory."""

    def __init__(self, gateway: Gateway, task: str) -> None:
        self._gateway, self._task = gateway, task

    def demand(self, slot: Slot) -> Demand:
        options = self._gateway.options_of(slot)
        kind = Kind(self._task, model_of(slot), options.env or "")
        return Demand(Need(options.memory_mb, options.gpu_mb), kind=kind)

    def standing(self, worker: Worker) -> Standing:
        options = self._gateway.options_of(worker.slot)
        loaded = float(worker.info.get("load_ms", 1000.0)) / 1000
        return Standing(
            self._gateway.in_flight(worker) > 0,
            pinned=options.pinned,
            reload_s=max(0.1, loaded),
            use=1.0 + worker.served,
        )

    def evict(self, worker: Worker, short_of: str) -> bool:
        self._gateway.evictions.evict(worker, short_of)
        return True

    def waits(self, slot: Slot, why: str) -> None:
        self._gateway.waits(slot, why)

    def refused(self, slot: Slot, why: str) -> None:
        self._gateway.never_fits(slot, why)


class Passenger(Protocol):
    """Another part of the node that the plane serves: its frames begin with its name."""

    def plane_is_up(self, send: Callable[..., None]) -> None: ...

    def plane_is_gone(self) -> None: ...

    def heard(self, frame: Frame) -> None: ...


class PlaneTenant(Nothing):
    """The tenant of the data plane's own pool. What it says goes to the gateway, or to the passenger whose name is in front."""

    kind = "plane"

    def __init__(self, gateway: Gateway, passengers: Mapping[str, Passenger]) -> None:
        self._gateway, self._passengers = gateway, passengers

    def ready(self, worker: Worker, info: Mapping[str, Any]) -> None:
        for passenger in self._passengers.values():
            passenger.plane_is_up(worker.send)
        # The last: with the catalog it begins to serve, and clients of sessions are to find their pools.
        self._gateway.plane_is_up(worker)

    def heard(self, worker: Worker, frame: Frame) -> None:
        if (passenger := self._passengers.get(str(frame[0]))) is not None:
            passenger.heard(frame[1:])
        else:
            self._gateway.heard(frame)

    def gone(self, worker: Worker, end: Exit) -> Left:
        self._gateway.plane_is_gone(worker)
        for passenger in self._passengers.values():
            passenger.plane_is_gone()
        return Left()
