"""Replicas: the workers of one model. Each has a slot in the pool of its task; the slot's key says which model and replica it is."""

from __future__ import annotations

import json

from ostler.lifecycle.worker import Pool, Slot


def key_of(model: str, replica: int) -> str:
    """What a slot is for; ids may hold anything, so this is in no name of a file or a component."""
    return json.dumps([model, replica])


def slot_of(pool: Pool, model: str, replica: int) -> Slot | None:
    key = key_of(model, replica)
    return next((slot for slot in pool.slots if slot.key == key), None)


def model_of(slot: Slot) -> str:
    return str(json.loads(slot.key or '[""]')[0])


def place_of(slot: Slot) -> tuple[str, str, int]:
    """Task, model and replica: what the data plane calls it."""
    model, replica = json.loads(slot.key or "[]")
    return slot.pool.spec.name, model, replica
