"""What an operator asks of models while the node runs: load this, unload that, stay longer. Until the node's next start."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ostler.calls.model import ModelSpec, merged
from ostler.errors import BadArguments, ConfigError, Conflict, NotFound
from ostler.names import no_task

if TYPE_CHECKING:
    from ostler.calls.gateway import Gateway

CHANGEABLE = ("idle", "pinned", "queue", "startup", "timeout")


class Wishes:
    """The gateway's part for operators."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def _spec(self, task: str) -> ModelSpec:
        spec = self._gateway.models.get(task)
        if spec is None:
            raise NotFound(no_task(task, self._gateway.models))
        return spec

    def _model(self, spec: ModelSpec, model: str | None) -> str:
        if model is None:
            if len(spec.models) != 1:
                raise BadArguments(f"{spec.name} has several models: name one; known: {', '.join(spec.models)}")
            return next(iter(spec.models))
        spec.options(model)
        return model

    def load(self, task: str, model: str | None) -> str:
        """Have it loaded, as a call would; returns its id. Raises NotFound, BadArguments, Conflict."""
        spec = self._spec(task)
        model = self._model(spec, model)
        if why := self._gateway.launches.unavailable(task, model):
            raise Conflict(f"{task} {model!r} is unavailable: {why}")
        for replica in range(spec.options(model).workers):
            self._gateway.want(task, model, replica)
        return model

    async def unload(self, task: str, model: str | None) -> str:
        """Have it leave now, instead of when its idle time is over; returns its id. Raises NotFound, BadArguments, and Conflict while
        it has calls or is pinned.
        """
        spec = self._spec(task)
        model = self._model(spec, model)
        slots = self._gateway.slots_of(task).get(model, [])
        if not all(await asyncio.gather(*(self._gateway.evictions.unload(slot) for slot in slots))):
            raise Conflict(f"{task} {model!r} stays: it has calls, or is pinned")
        return model

    def change(self, task: str, model: str | None, options: Mapping[str, Any]) -> None:
        """Put these over the options of one model, or of all of a task. Raises NotFound, BadArguments."""
        spec = self._spec(task)
        if unknown := sorted(set(options) - set(CHANGEABLE)):
            raise BadArguments(
                f"{unknown[0]!r} of {task} cannot be changed while it runs; these can: {', '.join(CHANGEABLE)}"
            )
        ids = [model] if model is not None else [*spec.models]
        try:
            changed = {one: merged(f"{task}, {one!r}", spec.options(one), options) for one in ids}
            common = merged(task, spec.common, options) if model is None else spec.common
        except ConfigError as error:
            raise BadArguments(str(error)) from None
        self._gateway.models[task] = dataclasses.replace(spec, models={**spec.models, **changed}, common=common)
        self._gateway.tell_catalog()
