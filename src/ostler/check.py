"""What an app and its settings must agree on. `ostler check` and the node's start ask the same questions."""

from __future__ import annotations

import re
import shutil

from ostler import config, envs
from ostler.app import Ostler
from ostler.config import Settings
from ostler.envs.run import JOBS
from ostler.errors import ConfigError, InputError
from ostler.jobs import schedule, signature
from ostler.lifecycle.command import Command
from ostler.sessions.spec import SessionSpec

_PLACE = re.compile(r"\{([a-z_]+)\}")


def check_app(settings: Settings, app: Ostler, target: str) -> None:
    """Raise ConfigError with one sentence unless a node can be started."""
    queues = sorted({task.queue for task in app.tasks.values()})
    known = [*queues, *app.commands, *app.models, *app.session_pools]
    shown = ", ".join(known) or "none"
    if unknown := settings.pools.keys() - set(known):
        name = min(unknown)
        raise ConfigError(
            f"pool {name!r} is configured (ostler.toml, OSTLER_POOLS or --pool), but {target} declares no such queue, command, model or sessions; known: {shown}"
        )
    if unused := app.pools.keys() - set(known):
        raise ConfigError(
            f"{target} sizes pool {min(unused)!r}, but declares no such queue, command, model or sessions; known: {shown}"
        )
    if nowhere := app.queues.keys() - set(queues):
        raise ConfigError(
            f"{target} limits queue {min(nowhere)!r}, but no job uses it; known: {', '.join(queues) or 'none'}"
        )
    if hooked := app.hooks.queues() - set(queues):
        raise ConfigError(
            f"{target} has on_start or on_stop for queue {min(hooked)!r}, but no job uses it; known: {', '.join(queues) or 'none'}"
        )
    for name in known:
        config.check_pool(settings, name, settings.pool(name, app.pools.get(name)))
    for name in known:
        _check_sessions(settings, app, name)
    for command in app.commands.values():
        _check_command(command)
        if settings.pool(command.name, app.pools.get(command.name)).env is not None:
            raise ConfigError(f"command {command.name!r} cannot have an env; put the path of its interpreter into argv")
    for queue in queues:
        if (env := env_of(settings, app, queue)) is not None:
            envs.interpreter(settings, app, env, JOBS)
    for name, (spec, zone, step) in app.schedules.items():
        try:
            schedule.check(spec, zone)
            step.waiting()
        except (ConfigError, InputError) as error:
            place = app._places.get(f"schedule {name!r}", "")  # noqa: SLF001
            raise ConfigError(f"schedule {name!r}{place}: {error}") from None


def check_routes(settings: Settings, app: Ostler) -> None:
    """Raise ConfigError unless the app's own routes can be served. The node itself finds out when it builds them."""
    if app.routes:
        from ostler.web import own  # noqa: PLC0415  only an app with routes needs the web framework here

        own.check(app.routes, settings)


def _check_sessions(settings: Settings, app: Ostler, name: str) -> None:
    """Settings of sessions are for sessions; and they must fit."""
    if name in app.session_pools:
        session_spec(settings, app, name)
        return
    own = settings.pools.get(name)
    if wrong := [key for key in config.SESSION_KEYS if own is not None and getattr(own, key) is not None]:
        raise ConfigError(f"pools.{name}.{wrong[0]} is a setting for sessions, but {name!r} is not a session pool")


def session_spec(settings: Settings, app: Ostler, name: str) -> SessionSpec:
    """A declared pool of sessions, with what the settings say of it. Raises ConfigError."""
    pool = settings.pool(name, app.pools.get(name))
    spec = app.session_pools[name].with_options(**{key: getattr(pool, key) for key in config.SESSION_KEYS})
    if (env := pool.env or spec.options.env) is not None:
        envs.interpreter(settings, app, env, JOBS)
        spec = spec.with_options(env=env)
    return spec


def env_of(settings: Settings, app: Ostler, queue: str) -> str | None:
    """The environment of a queue's workers; None: the node's own."""
    return settings.pool(queue, app.pools.get(queue)).env or app.env_of(queue)


def _check_command(command: Command) -> None:
    texts = [*command.argv, *command.env.values(), command.ready or ""]
    if wrong := {place for text in texts for place in _PLACE.findall(text)} - {"port", "n"}:
        raise ConfigError(f"command {command.name!r}: {{{min(wrong)}}} is not a placeholder; use {{port}} or {{n}}")


def warnings(settings: Settings, app: Ostler) -> list[str]:
    """What may be meant, but looks like a mistake."""
    declares = app.tasks or app.commands or app.models or app.session_pools
    found = [] if declares else ["it declares no jobs, commands, models or sessions"]
    names = [*sorted({task.queue for task in app.tasks.values()}), *app.commands]
    found += [f"pool {name!r} has no workers" for name in names if not settings.pool(name, app.pools.get(name)).workers]
    for command in app.commands.values():
        if "{" not in command.argv[0] and shutil.which(command.argv[0], path=command.env.get("PATH")) is None:
            found.append(f"command {command.name!r}: the program {command.argv[0]!r} was not found")
    found += [f"job {task.name!r}: {doubt}" for task in app.tasks.values() for doubt in signature.doubts(task.function)]
    for queue in sorted({task.queue for task in app.tasks.values()}):
        if (env := env_of(settings, app, queue)) and (seen := envs.look(settings, app, env)).state != "ready":
            found.append(f"environment {env!r} of queue {queue!r} is {seen.state}: {seen.reason}; run: {seen.command}")
    return found + config.strangers()
