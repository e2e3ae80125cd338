"""How models' workers are started: the program with the declared class, or the declared server; and why one cannot be started."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ostler.calls.model import ModelOptions, ModelSpec
from ostler.calls.program import Program
from ostler.calls.replica import model_of
from ostler.calls.tenants import Memory, Models
from ostler.config import Settings
from ostler.errors import OstlerError
from ostler.lifecycle.listening import socket_name
from ostler.lifecycle.worker import PoolSpec, Slot, Worker

if TYPE_CHECKING:
    from ostler.calls.gateway import Gateway

MAX_BODY = 64 * 1024 * 1024


class Launches:
    """The models' pools of one app, as the supervisor needs them."""

    def __init__(
        self,
        settings: Settings,
        models: Mapping[str, ModelSpec],
        target: str,
        run: Path,
        interpreter: Callable[[str | None], Path],
    ) -> None:
        self._settings, self._models, self._target, self._run = settings, models, target, run
        self._interpreter = interpreter
        self._programs = {s.name: Program(s, run, interpreter) for s in models.values() if s.is_server}

    def pool_specs(self, gateway: Gateway) -> list[PoolSpec]:
        """A pool on demand for each task."""
        return [self._pool(spec, gateway) for spec in self._models.values()]

    def _pool(self, spec: ModelSpec, gateway: Gateway) -> PoolSpec:
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
            startup_deadline=lambda slot: gateway.options_of(slot).startup,
            stale_after=settings.stale_after,
            stop_grace=settings.stop_grace,
            term_grace=settings.term_grace,
            tenant=Models(gateway),
            on_demand=True,
            outlasts=1,  # jobs that finish may call it
            need=Memory(gateway, spec.name),
        )

    def _argv(self, spec: ModelSpec, slot: Slot) -> list[str]:
        model = model_of(slot)
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
        spec = self._models[task]
        try:
            self._interpreter(spec.options(model).env)
            if program := self._programs.get(task):
                program.check(model)
        except OstlerError as error:
            return str(error)
        path = spec.missing(model)
        return f"its file {path} does not exist" if path else None

    def address(self, worker: Worker) -> str:
        """Where it is called: the name of a socket in the run directory, or `tcp:PORT`."""
        program = self._programs.get(worker.pool.spec.name)
        return program.address(worker) if program else str(worker.info.get("socket", ""))

    def removed(self, worker: Worker) -> None:
        """The worker is gone: its socket, too."""
        if program := self._programs.get(worker.pool.spec.name):
            program.ended(worker)


def launch(
    python: str,
    target: str,
    name: str,
    model_id: str,
    options: ModelOptions,
    *,
    run: str,
    socket: str,
    max_body: int = MAX_BODY,
) -> list[str]:
    """How a model's worker is started, all in its argv: workers of one pool differ, and a pool's variables are the same for all.

    `python` is the interpreter of its environment, `run` the directory of the sockets, `socket` the name of this worker's in it.
    """
    worker = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")  # noqa: PTH100, PTH118, PTH120
    told = {
        "foreign": options.env is not None,
        "env": options.env,
        "concurrency": options.concurrency,
        "batch": options.batch,
        "batch_wait": options.batch_wait,
        "max_body": max_body,
        "run": run,
    }
    # Neither PYTHONPATH nor the user's own packages reach another environment.
    apart = ["-E", "-s"] if options.env is not None else []
    return [python, *apart, worker, target, name, model_id, socket, json.dumps(told)]
