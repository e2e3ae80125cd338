"""Calls from the terminal: the log of those that ended, those under way, and cancelling one."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import click

from ostler.cli import client, show
from ostler.cli.options import as_json, where
from ostler.config import Settings
from ostler.errors import BadArguments
from ostler.store.calls import OUTCOMES


@click.group(invoke_without_command=True)
@click.option("--task", help="Only calls of this task.")
@click.option("--model", help="Only calls of this model.")
@click.option("--outcome", type=click.Choice(OUTCOMES), help="Only calls with this outcome.")
@click.option("--request", metavar="ID", help="Only the call with this id.")
@click.option("--running", is_flag=True, help="Calls that are waiting or running on this node, instead of the log.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@click.option("--before", metavar="CURSOR", help="Continue after the previous page; it prints this value.")
@where
@as_json
@click.pass_context
def calls(
    ctx: click.Context,
    known: Settings,
    task: str | None,
    model: str | None,
    outcome: str | None,
    request: str | None,
    running: bool,
    limit: int,
    before: str | None,
    json_: bool,
) -> None:
    """Show the log of model calls, newest first; or the calls in progress."""
    if ctx.invoked_subcommand is not None:
        return
    if running:
        _running(known, {"task": task, "model": model, "request": request}, json_)
        return
    with client.open_store(known) as opened:
        filters = {"task": task, "model": model, "outcome": outcome, "request": request}
        page, following = opened.calls.list(limit=limit, before=_place(before), **filters)
    cursor = following and f"{following[0]}/{following[1]}"
    if json_:
        show.as_json({"calls": page, "next": cursor})
        return
    columns = ("request", "task", "model", "outcome", ">status", ">waited", ">took", ">in", ">out", "when", "what")
    show.table(columns, map(_row, page), "no calls")
    if cursor:
        print(f"older ones: --before {cursor}")


def _place(before: str | None) -> tuple[int, str] | None:
    if before is None:
        return None
    number, _, node = before.partition("/")
    if not number.isdecimal() or len(number) > 18:
        raise BadArguments(f"--before needs the value that the previous page printed, found {before!r}")
    return int(number), node


def _row(call: dict[str, Any]) -> tuple[Any, ...]:
    took = "" if call["took_ms"] is None else show.span(call["took_ms"] / 1000)
    memory = f"{call['host_mb']:.0f} MB" if call["host_mb"] else ""
    gpu = f"{call['gpu_mb']:.0f} MB GPU" if call["gpu_mb"] else ""
    what = ", ".join(filter(None, [call["code"], "streamed" if call["streamed"] else "", memory, gpu]))
    return (
        call["request"],
        call["task"],
        call["model"],
        show.state(call["outcome"]),
        call["status"],
        show.span(call["waited_ms"] / 1000),
        took,
        show.size(call["bytes_in"]),
        show.size(call["bytes_out"]),
        show.ago(call["asked_at"]),
        what,
    )


def _running(known: Settings, filters: dict[str, str | None], json_: bool) -> None:
    found = client.request(known, "GET", "/api/v1/calls/running")
    wanted = {name: value for name, value in filters.items() if value is not None}
    shown = [call for call in found["calls"] if all(call[name] == value for name, value in wanted.items())]
    if json_:
        show.as_json({**found, "calls": shown})
        return
    columns = ("request", "task", "model", "state", ">waited", ">running", ">in", ">out")
    rows = (
        (
            call["request"],
            call["task"],
            call["model"],
            show.state(call["state"]),
            show.span(call["waited_ms"] / 1000),
            "" if call["running_ms"] is None else show.span(call["running_ms"] / 1000),
            show.size(call["bytes_in"]),
            show.size(call["bytes_out"]),
        )
        for call in shown
    )
    show.table(columns, rows, "no calls in progress")
    if found["total"] > len(found["calls"]):
        print(f"and {found['total'] - len(found['calls'])} more")


@calls.command()
@click.argument("request")
@where
def cancel(known: Settings, request: str) -> None:
    """Cancel a waiting or running call by its request id. Its caller gets 499 CANCELLED."""
    found = client.request(known, "DELETE", f"/api/v1/calls/{quote(request, safe='')}")["calls"]
    print(f"call {request} is cancelled" if found == 1 else f"{found} calls {request} are cancelled")
