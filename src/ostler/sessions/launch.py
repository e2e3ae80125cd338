"""How session workers are started: the program with the declared class, or the declared program; and what is removed after them."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from ostler import envs
from ostler.calls.address import GIVEN
from ostler.config import Settings
from ostler.lifecycle.admission import Need
from ostler.lifecycle.listening import Listening
from ostler.lifecycle.recycle import RecycleLimits
from ostler.lifecycle.reserving import Declared
from ostler.lifecycle.worker import PoolSpec, Slot, Worker
from ostler.sessions.scratch import Scratch
from ostler.sessions.spec import SessionSpec
from ostler.sessions.tenant import Sessions

if TYPE_CHECKING:
    from ostler.sessions.pools import SessionPools


class Launches:
    """The session pools of one app, as the supervisor needs them."""

    def __init__(self, settings: Settings, app: Any, target: str, url: str) -> None:
        self._settings, self._app, self._target, self._url = settings, app, target, url
        self.scratch = Scratch(settings.data_dir)
        self._listening: dict[str, Listening] = {}

    def pool_specs(self, pools: SessionPools) -> list[PoolSpec]:
        """A pool for each declaration."""
        return [self._pool(spec, pools) for spec in pools.specs.values()]

    def _pool(self, spec: SessionSpec, pools: SessionPools) -> PoolSpec:
        settings, options = self._settings, spec.options
        pool: Any = settings.pool(spec.name, self._app.pools.get(spec.name))
        if spec.is_program:
            texts = (*spec.argv, *spec.variables.values())
            self._listening[spec.name] = Listening(spec.name, settings.data_dir / "run", texts, spec.ready)
        listening = self._listening.get(spec.name)
        if listening is not None:
            listening.check_socket()
        # Its replacement is started before its lifetime is over, so that the pool always has room.
        count = options.lifetime - options.margin if options.lifetime else 0
        return PoolSpec(
            name=spec.name,
            size=pool.workers,
            argv=spec.argv if listening else lambda slot: self._argv(spec, slot),
            env=spec.variables,
            given={} if listening else self._given(spec),
            fills=listening.fills if listening else lambda _: {},
            cwd=spec.cwd,
            probe=listening.probe() if listening else None,
            startup_deadline=pool.startup_deadline,
            stale_after=pool.stale_after,
            stop_grace=options.drain + settings.stop_grace,
            term_grace=settings.term_grace,
            folder=str(self.scratch.root),
            leaves_within=options.drain + settings.stop_grace,
            recycle=RecycleLimits(count, pool.recycle_age, pool.recycle_rss_mb, warm=True),
            tenant=Sessions(pools),
            need=Declared(spec.name, Need(options.memory_mb, 0.0)) if options.memory_mb else None,
        )

    def _given(self, spec: SessionSpec) -> dict[str, str]:
        env = {"OSTLER_STORE": self._settings.store, "OSTLER_DATA": str(self._settings.data_dir), GIVEN: self._url}
        return env if spec.options.env is None else env | envs.variables(self._settings, spec.options.env)

    def _argv(self, spec: SessionSpec, slot: Slot) -> list[str]:
        options = spec.options
        folder = self.scratch.of(spec.name, slot.number, slot.generation)
        given: dict[str, Any] = {"generation": slot.generation, "slots": options.slots, "probe": options.probe}
        given |= {"slow_ms": options.slow_ms, "redirect": options.redirect, "host": self._settings.host}
        given |= {"idle": options.idle, "longest": options.longest, "ping": options.ping}
        arguments = [self._target, spec.name, str(folder), json.dumps(given)]
        if options.env is not None:
            return envs.command(self._settings, self._app, options.env, "ostler.sessions.worker", *arguments)
        return [sys.executable, "-u", "-m", "ostler.sessions.worker", *arguments]

    def address(self, worker: Worker, spec: SessionSpec) -> str | None:
        """Where a program is reached; None of a worker that says so itself."""
        listening = self._listening.get(spec.name)
        return None if listening is None else listening.address(worker)

    def removed(self, worker: Worker) -> None:
        """The worker and its family are gone: its socket and its directory, too."""
        name = worker.pool.spec.name
        if (listening := self._listening.get(name)) is not None:
            listening.ended(worker)
        else:
            self.scratch.remove(name, worker.slot.number, worker.generation)
