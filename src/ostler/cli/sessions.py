"""Sessions from the terminal: those under way and those that ended, ending one, and what there is room for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import quote, urlencode

import click

from ostler.calls.address import node_url
from ostler.cli import client, show
from ostler.cli.options import as_json, where
from ostler.config import Settings
from ostler.errors import BadArguments, OstlerError


def _filters(function: Callable[..., Any]) -> Callable[..., Any]:
    """What a listing can be asked for."""
    for option in reversed(
        (
            click.option("--state", type=click.Choice(["live", "ended", "all"]), default="all", show_default=True),
            click.option(
                "--pool", metavar="NAME", help="Only sessions of this pool, or of the name that clients connect to."
            ),
            click.option("--owner", metavar="OWNER", help="Only sessions of this owner, such as token:checks."),
            click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True),
            click.option("--before", metavar="CURSOR", help="Continue after the previous page; it prints this value."),
        )
    ):
        function = option(function)
    return where(as_json(function))


@click.group(invoke_without_command=True)
@_filters
@click.pass_context
def sessions(ctx: click.Context, /, known: Settings, **asked: Any) -> None:
    """List sessions: open ones first, newest first. The same as `ostler sessions list`."""
    if ctx.invoked_subcommand is None:
        _list(known, **asked)


@sessions.command("list")
@_filters
def listing(known: Settings, **asked: Any) -> None:
    """List sessions: open ones first, newest first."""
    _list(known, **asked)


def _list(known: Settings, *, json_: bool, **asked: Any) -> None:
    found = _from_store(known, **asked) if node_url(known) is None else _from_node(known, **asked)
    if json_:
        show.as_json(found)
        return
    columns = ("session", "state", "owner", "client", "worker", ">age", ">idle", ">waited", ">in", ">out", "why")
    show.table(columns, map(_row, found["sessions"]), "no sessions")
    if found["next"]:
        print(f"more: --before {found['next']}")


def _from_node(known: Settings, **asked: Any) -> Any:
    query = urlencode({name: value for name, value in asked.items() if value is not None})
    return client.request(known, "GET", f"/api/v1/sessions?{query}")


def _from_store(known: Settings, *, before: str | None, **asked: Any) -> dict[str, Any]:
    """No node runs here: what the store has. Nobody can tell bytes and idle times of what other nodes have under way."""
    with client.open_store(known) as opened:
        rows, following = opened.sessions.list(before=_place(before), **asked)
    unknown = {"idle": None, "views": False}
    for row in rows:
        row |= {"worker": row.pop("component"), "state": "ended" if row["ended_at"] else "live", **unknown}
    return {"sessions": rows, "next": following and f"{following[0]}/{following[1]}"}


def _place(before: str | None) -> tuple[int, str] | None:
    if before is None:
        return None
    number, slash, session = before.removeprefix("live/").partition("/")
    if not number.isdecimal() or len(number) > 18 or not slash:
        raise BadArguments(f"--before needs the value that the previous page printed, found {before!r}")
    return int(number), session


def _row(session: dict[str, Any]) -> tuple[Any, ...]:
    ended, began = session["ended_at"], session["started_at"]
    idle = session.get("idle")
    reason = session["reason"] or ""
    words = f"{reason}: {session['text']}" if session["text"] else reason
    return (
        session["id"],
        show.state(session["state"]),
        _cut(session["owner"]),
        _cut(session["client"] or ""),
        session["worker"],
        show.span((ended - began) / 1000) if ended else show.since(began),
        "" if idle is None else show.span(idle),
        show.span(session["waited_ms"] / 1000),
        show.size(session["bytes_in"]),
        show.size(session["bytes_out"]),
        words if not ended else f"{words} ({show.ago(ended)})",
    )


def _cut(text: str, most: int = 40) -> str:
    """Clients say who they are, at any length."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


@sessions.command()
@click.argument("ids", metavar="ID…", nargs=-1, required=True)
@where
def kill(known: Settings, ids: tuple[str, ...]) -> None:
    """End sessions on any node. Their clients are told that an operator ended them."""
    wrong: list[OstlerError] = []
    for session in ids:
        try:
            found = client.request(known, "DELETE", f"/api/v1/sessions/{quote(session, safe='')}")
        except OstlerError as error:
            if len(ids) == 1:
                raise
            print(f"ostler: {error}")
            wrong.append(error)
        else:
            print(f"ended session {session}" if found["here"] else f"session {session}: asked its node to end it")
    if wrong:
        raise SystemExit(2)


@sessions.command()
@where
@as_json
def capacity(known: Settings, json_: bool) -> None:
    """Show slots, workers and waiting clients of this node's session pools."""
    found = client.request(known, "GET", "/api/v1/capacity")
    if json_:
        show.as_json(found)
        return
    if not found["pools"]:
        print("the node has no session pools; declare one with @app.sessions")
    for pool in found["pools"]:
        flags = " (paused)" if pool["paused"] else ""
        used = f"{pool['in_use']} in use, {pool['free']} of {pool['slots']} slots free, {pool['waiting']} waiting"
        show.console().print(f"{pool['name']}{flags}: {used}")
        columns = ("worker", "state", "slots", ">in use", ">served", ">probe", ">memory", ">age", "versions")
        show.table(columns, map(_worker, pool["workers"]), "  no workers")
        if pool["line"]:
            first = pool["line"][0]
            show.console().print(f"first in line: {_cut(first['owner'])}, waiting for {show.span(first['waited'])}")
        print()
    if found["elsewhere"]:
        print("on other nodes:")
        show.table(("worker", "sessions", "state", "slots", ">in use", ">served"), map(_far, found["elsewhere"]), "")


def _served(worker: dict[str, Any]) -> str:
    return f"{worker['served']}/{worker['lifetime']}" if worker["lifetime"] else str(worker["served"])


def _far(worker: dict[str, Any]) -> tuple[Any, ...]:
    slots = show.cells(worker["in_use"], worker["slots"]), f"{worker['in_use']}/{worker['slots']}"
    name = f"{worker['name']}/{worker['component']}"
    return name, worker["serves"], show.state(worker["status"]), *slots, _served(worker)


def _worker(worker: dict[str, Any]) -> tuple[Any, ...]:
    return (
        worker["component"],
        show.state(worker["status"]),
        show.cells(worker["in_use"], worker["slots"]),
        f"{worker['in_use']}/{worker['slots']}",
        _served(worker),
        "" if worker["probe_ms"] is None else f"{worker['probe_ms']:.1f} ms",
        "" if worker["mb"] is None else f"{worker['mb']:.0f} MB",
        show.since(worker["started_at"]),
        ", ".join(worker["versions"]),
    )
