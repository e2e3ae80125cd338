"""Schedules: looking at them, running one now, pausing and resuming."""

from __future__ import annotations

import click

from ostler.cli import client, show
from ostler.cli.options import as_json, where
from ostler.config import Settings
from ostler.jobs.schedule import following
from ostler.store import now_ms


@click.group(invoke_without_command=True)
@where
@as_json
@click.pass_context
def schedules(context: click.Context, /, known: Settings, json_: bool) -> None:
    """List schedules with their last and next run; run, pause or resume one."""
    if context.invoked_subcommand is not None:
        return
    with client.open_store(known) as opened:
        found = opened.jobs.schedules.all()
    if json_:
        show.as_json({"schedules": found})
        return
    rows = [
        (
            s["name"],
            s["spec"],
            s["step"]["task"],
            f"paused ({s['zone']})" if s["paused"] else show.moment(s["next_at"], s["zone"]),
            show.ago(s["last_at"]),
            s["last_job"],
        )
        for s in found
    ]
    show.table(("schedule", "cron", "task", "next", "last", ">job"), rows, "no schedules")


@schedules.command()
@click.argument("name")
@where
def run(known: Settings, name: str) -> None:
    """Enqueue the job of schedule NAME now. The schedule itself does not change; it may be paused."""
    with client.writable_store(known) as opened:
        job, new = opened.jobs.schedules.run(name, now_ms())
    print(
        f"enqueued job {job}" if new else f"job {job} has the same unique key and has not ended; no new job was stored"
    )


@schedules.command()
@click.argument("name")
@where
def pause(known: Settings, name: str) -> None:
    """Pause schedule NAME until it is resumed."""
    _set(known, name, paused=True)


@schedules.command()
@click.argument("name")
@where
def resume(known: Settings, name: str) -> None:
    """Resume schedule NAME. Runs that were missed meanwhile are not made up for."""
    _set(known, name, paused=False)


def _set(known: Settings, name: str, *, paused: bool) -> None:
    with client.writable_store(known) as opened:
        found = opened.jobs.schedules.pause(name, opened.now(), following, paused=paused)
    if paused:
        print(f"schedule {name} is paused; resume it with: ostler schedules resume {name}")
    else:
        print(f"schedule {name} next runs at {show.moment(found['next_at'], found['zone'])}")
