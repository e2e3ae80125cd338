"""`ostler up` and `ostler check`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import click

from ostler import app as apps
from ostler import config
from ostler.cli.options import place


@click.command()
@click.argument("app")
@place
@click.option("--host", help="Address to listen on (default: 127.0.0.1).")
@click.option("--port", type=int, help="Port to listen on (default: 8356; 0: any free port).")
@click.option("--pool", "pools", multiple=True, metavar="NAME=N", help="Number of workers of a pool; can be repeated.")
@click.option("--name", help="The node's name (default: the host name).")
@click.option("--log-level", help="debug, info, warning or error.")
@click.option("--reload", is_flag=True, help="Start again whenever a file of the app changes (for development).")
@click.option(
    "--imports", is_flag=True, hidden=True, help="Load and check the app, print its files, and start nothing."
)
def up(
    app: str,
    data: str | None,
    store: str | None,
    file: Path | None,
    pools: tuple[str, ...],
    reload: bool,
    imports: bool,
    **flags: Any,
) -> None:
    """Start a node for APP: path/to/file.py, package.module or package.module:name.

    SIGTERM or Ctrl-C stops the node after running jobs have finished (up to stop_grace). A second one stops it at once.
    """
    # In a container: the kernel drops what PID 1 does not handle, and loading an app can take a while.
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, _leave)
    if reload:
        from ostler.cli import reload as reloading  # noqa: PLC0415

        root = Path(app).resolve().parent if app.endswith(".py") else Path.cwd()
        arguments = [argument for argument in sys.argv[2:] if argument != "--reload"]
        sys.exit(
            reloading.serve(
                arguments, root, Path(data or ".ostler").resolve(), (file or config.file_of(os.environ)).resolve()
            )
        )
    loaded = apps.load(app)
    settings = loaded.settings(
        {**flags, "data": data, "store": store, "pools": config.parse_pools(pools, "--pool")}, file
    )
    if imports:
        from ostler.check import check_app, check_routes  # noqa: PLC0415
        from ostler.cli import reload as reloading  # noqa: PLC0415

        check_app(settings, loaded, app)
        check_routes(settings, loaded)
        print(reloading.imports())
        return
    for warning in config.strangers():
        print(f"ostler: warning: {warning}", file=sys.stderr)
    from ostler.runtime import serve  # noqa: PLC0415  only this command needs the web framework

    serve(settings, loaded, app)


def _leave(number: int, _: object) -> None:
    """End at once: nothing of the node runs yet. An exception would be taken for one of the app's file."""
    os._exit(128 + number)


@click.command()
@click.argument("app")
@place
@click.option("--pool", "pools", multiple=True, metavar="NAME=N", help="Number of workers of a pool; can be repeated.")
def check(app: str, data: str | None, store: str | None, file: Path | None, pools: tuple[str, ...]) -> None:
    """Check the settings and APP without starting anything."""
    loaded = apps.load(app)
    settings = loaded.settings({"data": data, "store": store, "pools": config.parse_pools(pools, "--pool")}, file)
    from ostler.check import check_app, check_routes, warnings  # noqa: PLC0415
    from ostler.cli import show  # noqa: PLC0415
    from ostler.jobs import schedule, signature  # noqa: PLC0415
    from ostler.store import now_ms  # noqa: PLC0415

    check_app(settings, loaded, app)
    check_routes(settings, loaded)

    def workers(pool: str) -> int | None:
        return settings.pool(pool, loaded.pools.get(pool)).workers

    rows: list[Any] = [
        (f"{task.name}({signature.words(task.parameters)})", task.queue, workers(task.queue))
        for task in loaded.tasks.values()
    ]
    rows += [(" ".join(c.argv), c.name, workers(c.name)) for c in loaded.commands.values()]
    rows += [(f"model {', '.join(m.models) or 'of any id'}", m.name, "on demand") for m in loaded.models.values()]
    rows += [("sessions", name, workers(name)) for name in loaded.session_pools]
    show.table(("what", "pool", ">workers"), rows, f"{app} declares nothing yet")
    if loaded.schedules:
        planned = [
            (name, spec, show.moment(schedule.following(spec, zone, now_ms()), zone), step)
            for name, (spec, zone, step) in loaded.schedules.items()
        ]
        print()
        show.table(("schedule", "cron", "next", "job"), planned, "")
    doubts = warnings(settings, loaded)
    for doubt in doubts:
        print(f"warning: {doubt}")
    print("all good" if not doubts else "no errors")
