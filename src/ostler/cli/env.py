"""Environments from the terminal: list, show, build, remove."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ostler import app as apps
from ostler import config, envs
from ostler.app import Ostler
from ostler.cli import show as shows
from ostler.cli.options import as_json, place
from ostler.config import Settings
from ostler.errors import ConfigError, EnvError


def _told(function: Callable[..., Any]) -> Callable[..., Any]:
    """--app and where the settings are: the command's first parameters are the settings and the app."""

    @functools.wraps(function)
    def run(*args: Any, data: str | None, store: str | None, file: Path | None, app: str | None, **options: Any) -> Any:
        loaded = apps.load(app) if app else Ostler()
        flags = {"data": data, "store": store}
        settings = loaded.settings(flags, file) if app else config.load(flags, file=file)
        return function(settings, loaded, *args, **options)

    which = click.option("--app", metavar="APP", help="The app that declares environments, as for 'ostler up'.")
    return place(which(run))


@click.group()
def env() -> None:
    """Manage virtual environments for jobs and models that cannot use the node's own."""


@env.command(name="list")
@_told
@as_json
def list_(settings: Settings, app: Ostler, json_: bool) -> None:
    """List all environments and their state."""
    found = envs.listing(settings, app)
    if json_:
        shows.as_json({"envs": [envs.shown(one) for one in found]})
        return
    rows = [
        (one.name, shows.state(one.state), one.python, shows.ago(one.built_at), str(one.directory), _short(one.reason))
        for one in found
    ]
    shows.table(
        ("name", "state", "python", "built", "directory", "note"),
        rows,
        "no environments are declared; add [env.NAME] to ostler.toml, or name the app that declares one with --app",
    )


def _short(reason: str | None) -> str:
    return "" if reason is None else reason if len(reason) < 80 else reason[:77] + "…"


@env.command()
@click.argument("name")
@_told
@as_json
def show(settings: Settings, app: Ostler, name: str, json_: bool) -> None:
    """Show an environment: its description, its state, and the end of the log if its build failed."""
    found = envs.look(settings, app, name)
    told = envs.shown(found)
    if json_:
        shows.as_json(told)
        return
    console = shows.console()
    console.print(f"{name} is ", shows.state(found.state), f": {found.reason}" if found.reason else "", sep="")
    for key, value in (told["described"] or {}).items():
        console.print(f"  {key}: {', '.join(value) if isinstance(value, list) else value}")
    if found.interpreter is not None:
        built = f", built {shows.ago(found.built_at)} with {found.installer}" if found.built_at else ""
        console.print(f"  interpreter: {found.interpreter} (Python {found.python}{built})")
    for line in found.tail:
        console.print(f"  | {line}")
    if found.log and found.state == "failed":
        console.print(f"  log: {found.log}")
    if found.state != "ready":
        console.print(f"  build it with: {found.command}")


@env.command()
@click.argument("names", metavar="NAME...", nargs=-1)
@click.option("--all", "all_", is_flag=True, help="Build all declared environments, except existing ones (path = …).")
@click.option("--force", is_flag=True, help="Rebuild it even if it is ready.")
@click.option("--installer", type=click.Choice(["uv", "pip"]), help="Default: uv if it is found, else venv and pip.")
@_told
def build(
    settings: Settings, app: Ostler, names: tuple[str, ...], all_: bool, force: bool, installer: str | None
) -> None:
    """Build environments. One that is ready is not rebuilt; one whose build fails is left unchanged.

    Running workers keep the old build until they are restarted ('ostler restart').
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the installer ends with us
    if all_:
        found = envs.listing(settings, app)
        names = tuple(one.name for one in found if one.described is not None and one.described.path is None)
        if not names:
            raise ConfigError("no environments are declared; name the app that declares them with --app")
    if not names:
        raise click.UsageError("name an environment, or --all")
    failed = [name for name in names if not _built(settings, app, name, force, installer, alone=len(names) == 1)]
    if failed:
        raise EnvError(f"not built: {', '.join(failed)}; 'ostler env show NAME' shows the end of the log")


def _built(settings: Settings, app: Ostler, name: str, force: bool, installer: str | None, *, alone: bool) -> bool:
    try:
        envs.build(
            settings,
            app,
            name,
            force=force,
            installer=installer,
            tell=lambda line: print(shows.harmless(line), flush=True),
        )
    except EnvError as error:
        if alone:
            raise
        print(f"ostler: {error}")
        return False
    return True


@env.command()
@click.argument("name")
@click.option("--force", is_flag=True, help="Remove it even if processes are using it.")
@_told
def remove(settings: Settings, app: Ostler, name: str, force: bool) -> None:
    """Delete an environment's builds. Its description stays."""
    envs.remove(settings, app, name, force=force)
    print(f"removed environment {name}")
