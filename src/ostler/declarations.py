"""The declarations of an app, as the node, the workers and `ostler check` read them, and what must hold between them. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ostler import loading
from ostler.errors import ConfigError
from ostler.jobs.hooks import Hooks
from ostler.names import pool_name

# Most apps declare only some of these: the others' modules are not loaded.
if TYPE_CHECKING:
    from ostler.calls.model import ModelSpec
    from ostler.config import EnvSettings, PoolSettings
    from ostler.flows import Step
    from ostler.lifecycle.command import Command
    from ostler.sessions.spec import SessionSpec
    from ostler.task import Task


@dataclass(eq=False)
class Declarations:
    """Everything that one file declares, by name. Queues, commands, models and sessions share one set of names, and each queue has one environment."""

    store: str | None = None
    data: str | None = None
    tasks: dict[str, Task[..., Any]] = field(default_factory=dict, init=False)
    commands: dict[str, Command] = field(default_factory=dict, init=False)
    models: dict[str, ModelSpec] = field(default_factory=dict, init=False)
    session_pools: dict[str, SessionSpec] = field(default_factory=dict, init=False)
    pools: dict[str, PoolSettings] = field(default_factory=dict, init=False)
    envs: dict[str, EnvSettings] = field(default_factory=dict, init=False)
    target: str = field(default="", init=False)  # the name that it was loaded by
    schedules: dict[str, tuple[str, str, Step[Any]]] = field(default_factory=dict, init=False, repr=False)
    queues: dict[str, tuple[int | None, float | None]] = field(default_factory=dict, init=False, repr=False)
    routes: list[Callable[[Any], Any]] = field(default_factory=list, init=False, repr=False)
    hooks: Hooks = field(default_factory=Hooks, init=False, repr=False)
    _places: dict[str, str] = field(default_factory=dict, init=False, repr=False)  # pool -> where it was first named

    def _check_env(self, queue: str, env: str | None, what: str, pool: PoolSettings | None) -> None:
        """Refuse a second environment for a queue: its workers run in one."""
        others = [(f"job {task.name!r}", task.env) for task in self.tasks.values() if task.queue == queue]
        named = pool.env if pool else None
        if named is not None:  # it speaks for jobs that name none
            others = [(f"the pool {queue!r}", named), *((who, has or named) for who, has in others)]
            env = env or named
        for who, has in others:
            if has != env:
                raise ConfigError(
                    f"{what} of queue {queue!r} has {_env(env)}, but {who} has {_env(has)}: all workers of a queue run in one "
                    "environment; give all jobs of the queue the same env, or use another queue"
                )

    def env_of(self, queue: str) -> str | None:
        """The environment that the code sets for a queue's workers, on its pool or its jobs."""
        pool = self.pools.get(queue)
        named = (task.env for task in self.tasks.values() if task.queue == queue and task.env)
        return (pool.env if pool else None) or next(named, None)

    def _check_queue(self, queue: str, job: str) -> None:
        """Refuse a queue that cannot be a pool's name, or that a command, model or session pool already has."""
        self._named(pool_name(queue), f"the queue of job {job!r}", self._taken(queue))

    def _check_free(self, name: str) -> None:
        """Refuse a pool name that a queue, command, model or session pool already has."""
        queued = next((f"the queue of job {task.name!r}" for task in self.tasks.values() if task.queue == name), None)
        self._named(name, "this", self._taken(name) or queued)

    def _named(self, name: str, what: str, taken: str | None) -> None:
        if taken:
            raise ConfigError(
                f"{name!r} is already the name of {taken}{self._places.get(name, '')}; {what}{loading.line()} needs another name: queues, "
                "commands, models and sessions share one set of names, because each has its own workers"
            )
        self._places.setdefault(name, loading.line())

    def _taken(self, name: str) -> str | None:
        taken: dict[str, Mapping[str, Any]] = {
            "a command": self.commands,
            "a model": self.models,
            "sessions": self.session_pools,
        }
        return next((kind for kind, names in taken.items() if name in names), None)


def _env(env: str | None) -> str:
    return "no env" if env is None else f"env {env!r}"
