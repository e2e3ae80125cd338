"""The pools of a node: what the supervisor must know to start the workers of an app's queues and commands, and the data plane."""

from __future__ import annotations

import functools
import sys
from typing import Any

from ostler import envs
from ostler.app import Ostler
from ostler.calls.address import GIVEN
from ostler.check import env_of
from ostler.config import Settings
from ostler.lifecycle import probe
from ostler.lifecycle.admission import NONE, Need
from ostler.lifecycle.pauses import PLANE
from ostler.lifecycle.recycle import RecycleLimits
from ostler.lifecycle.reserving import Declared
from ostler.lifecycle.supervisor import LAST
from ostler.lifecycle.worker import Nothing, PoolSpec, Tenant
from ostler.web.server import run_folder


class Pools:
    """The pools of one app's queues and commands."""

    def __init__(self, settings: Settings, app: Ostler, target: str) -> None:
        self._settings, self._app, self._target = settings, app, target
        self.queues = sorted({task.queue for task in app.tasks.values()})

    def size(self) -> int:
        """How many workers they have together."""
        return sum(self._pool(name).workers for name in (*self.queues, *self._app.commands))

    def watermarks(self) -> dict[str, int]:
        """How many jobs each queue may hold; 0: any number."""
        return {queue: self._pool(queue).high_watermark or 0 for queue in self.queues}

    def specs(self, dispatcher: Tenant, url: str, origin: str, nice: int) -> list[PoolSpec]:
        """A spec for each. Workers are told the node's URL and the store's id; those of queues run with that niceness."""
        # Workers see the node's own settings, so that a job which enqueues another finds the same store.
        given = {
            "OSTLER_STORE": self._settings.store,
            "OSTLER_DATA": str(self._settings.data_dir),
            "OSTLER_MAX_PAYLOAD": str(self._settings.max_payload),
            "OSTLER_RESULTS": self._settings.results,
            "OSTLER_ORIGIN": origin,
            GIVEN: url,
        }
        return [
            *(self._queue(queue, dispatcher, given, nice) for queue in self.queues),
            *(self._command(name, given) for name in self._app.commands),
        ]

    def _queue(self, queue: str, dispatcher: Tenant, given: dict[str, str], nice: int) -> PoolSpec:
        env = env_of(self._settings, self._app, queue)
        variables = {} if env is None else envs.variables(self._settings, env)
        return self._spec(
            queue,
            argv=self._runner(env),
            tenant=dispatcher,
            given=given | variables,
            need=self._need(queue),
            nice=nice,
        )

    def _runner(self, env: str | None) -> Any:
        """What runs a queue's jobs. An environment is looked up at each start: it may have been built again meanwhile."""
        if env is None:
            return [sys.executable, "-u", "-m", "ostler.jobs.runner", self._target]
        return lambda _: envs.command(self._settings, self._app, env, "ostler.jobs.runner", self._target)

    def _command(self, name: str, given: dict[str, str]) -> PoolSpec:
        command = self._app.commands[name]
        return self._spec(
            name,
            argv=command.argv,
            tenant=Nothing(),
            env=command.env,
            given=given,
            cwd=command.cwd,
            probe=probe.parse(command.ready),
            drain_signal=command.drain_signal,
        )

    def _spec(self, name: str, **own: Any) -> PoolSpec:
        pool = self._pool(name)
        return PoolSpec(
            name=name,
            size=pool.workers,
            startup_deadline=pool.startup_deadline,
            stale_after=pool.stale_after,
            stop_grace=pool.stop_grace,
            term_grace=self._settings.term_grace,
            recycle=RecycleLimits(pool.recycle_count, pool.recycle_age, pool.recycle_rss_mb, pool.recycle_warm),
            **own,
        )

    def _pool(self, name: str) -> Any:
        return self._settings.pool(name, self._app.pools.get(name))

    def _need(self, queue: str) -> Declared | None:
        """The largest need of the queue's tasks, where one of them declares any."""
        policies = [task.row["policy"] for task in self._app.tasks.values() if task.queue == queue]
        needs = [Need(policy.get("memory_mb", 0.0), policy.get("gpu_mb", 0.0)) for policy in policies]
        largest = functools.reduce(Need.largest, needs, NONE)
        return None if largest == NONE else Declared(queue, largest)


def plane(settings: Settings, tenant: Tenant, clients: int) -> PoolSpec:
    """The data plane's pool: one worker, which gets the socket that clients connect to."""
    return PoolSpec(
        tenant=tenant,
        name=PLANE,
        size=1,
        argv=[sys.executable, "-u", "-P", "-m", "ostler.plane", str(run_folder(settings.data_dir).resolve())],
        given={"OSTLER_DATA": str(settings.data_dir)},
        descriptors={"LISTEN": clients},
        outlasts=LAST,
        startup_deadline=settings.startup_deadline,
        stale_after=settings.stale_after,
        stop_grace=settings.stop_grace,
        term_grace=settings.term_grace,
    )
