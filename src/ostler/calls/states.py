"""The models as health shows them, in seed 003's words. From memory: nothing here waits for anybody."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ostler.lifecycle.state import Status
from ostler.lifecycle.worker import Slot, Worker

if TYPE_CHECKING:
    from ostler.calls.gateway import Gateway
    from ostler.calls.model import ModelSpec

_FRESH = 2.0  # seconds for which the look at files and environments is used again


class States:
    """What is shown of each model. IDLE is not loaded, which is no fault; UNAVAILABLE could not be started, and says why."""

    def __init__(self, gateway: Gateway, models: Mapping[str, ModelSpec]) -> None:
        self._gateway, self._models = gateway, models
        self._looked: dict[tuple[str, str], tuple[float, str | None]] = {}

    def __call__(self) -> dict[str, dict[str, Any]]:
        """By "task:model"; of a model with several workers the one that can do most."""
        found = {}
        for task in self._models:
            for model, slots in self._gateway.slots_of(task).items():
                told = self._gateway.facts.get(f"{task}\n{model}", {})
                found[f"{task}:{model}"] = self._one(task, model, slots, told)
        return found

    def _one(self, task: str, model: str, slots: list[Slot], told: Mapping[str, Any]) -> dict[str, Any]:
        slot = min(slots, key=_rank, default=None)
        worker = slot.worker if slot else None
        state, reason = self._state(task, model, slot, told)
        memory = [s.worker.rss_mb or 0.0 for s in slots if s.worker is not None]
        address = self._gateway.launches.address(worker) if worker is not None and worker.accepting else ""
        port = int(address[4:]) if address.startswith("tcp:") else None
        return {
            "state": state,
            "reason": reason or self._gateway.records.reason(task, model),
            "idle_seconds": self._gateway.records.since_told(told.get("idle_seconds")),
            "memory_mb": round(sum(memory), 1) if memory else None,
            "socket": None if port else address or None,
            "port": port,
            "in_flight": told.get("in_flight", 0),
            "waiting": told.get("waiting", 0),
            "worker": slot.component if slot else None,
            "workers": len(memory),
        }

    def _state(self, task: str, model: str, slot: Slot | None, told: Mapping[str, Any]) -> tuple[str, str | None]:
        worker = slot.worker if slot else None
        if worker is not None and slot is not None:
            parked = self._gateway.parking.states.get(worker)  # parking, parked or waking
            return (parked.upper() if parked else _of_worker(worker, told)), None
        if slot is not None and slot.rest is Status.FAILED:
            return "FAILED", self._gateway.why_failed(slot)
        if slot is not None and slot.waiting:
            return "STARTING", slot.waiting
        why = self._unavailable(task, model)
        return ("UNAVAILABLE", why) if why else ("IDLE", None)

    def _unavailable(self, task: str, model: str) -> str | None:
        now = time.monotonic()
        at, why = self._looked.get((task, model), (-1e9, None))
        if now >= at + _FRESH:
            why = self._gateway.launches.unavailable(task, model)
            self._looked[task, model] = now, why
        return why


def _of_worker(worker: Worker, told: Mapping[str, Any]) -> str:
    if worker.status is Status.STARTING:
        return "STARTING"
    if not worker.accepting:
        return "TERMINATED"
    return "BUSY" if told.get("in_flight") else "READY"


def _rank(slot: Slot) -> int:
    """A model is shown by its best worker."""
    if slot.worker is None:
        return 2
    return 0 if slot.worker.accepting else 1
