"""The music tagger from the terminal. All of it is asked of the node that runs `ostler.apps.music`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from ostler.cli import client, show
from ostler.cli.options import as_json, where
from ostler.config import Settings

_API = "/api/v1"


@click.group()
def music() -> None:
    """Tag a music library: scan, tag, calibrate, search. Needs a node: ostler up ostler.apps.music."""


def _path(library: str, *more: str) -> str:
    return "/".join((f"{_API}/libraries/{quote(library, safe='')}", *more))


@music.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--name", help="What to call it (default: the directory's name).")
@click.option(
    "--write-to",
    type=click.Choice(["database", "file", "sidecar"]),
    help="Where tags go: the database alone (default), the files' own metadata, or a file beside each.",
)
@click.option("--ignore", multiple=True, metavar="PATTERN", help="Leave these out; may be given several times.")
@click.option("--watch/--no-watch", default=True, help="Scan it again when something changes in it (default: yes).")
@where
@as_json
def add(known: Settings, folder: Path, json_: bool, **wishes: Any) -> None:
    """Make DIR a library: its files are scanned, and each is tagged."""
    wishes["ignore"] = list(wishes["ignore"]) or None
    body = {"path": os.path.abspath(folder), **{name: value for name, value in wishes.items() if value is not None}}  # noqa: PTH100
    made = client.request(known, "POST", f"{_API}/libraries", body)
    if json_:
        show.as_json(made)
    else:
        print(
            f"library {made['id']} ({made['name']}): job {made['job']} scans {made['path']}; follow it with: ostler music status"
        )


@music.command()
@click.argument("library", required=False)
@click.option("--watch", is_flag=True, help="Follow it until scans and tagging are done.")
@where
@as_json
def status(known: Settings, library: str | None, watch: bool, json_: bool) -> None:
    """Libraries with their tracks and progress; of one LIBRARY (id, name or path) also what could not be read."""
    if json_:
        show.as_json(client.request(known, "GET", _path(library) if library else f"{_API}/libraries"))
    elif library:
        _one(client.request(known, "GET", _path(library)))
    elif watch:
        _follow(known)
    else:
        _table(_libraries(known))


def _libraries(known: Settings) -> list[dict[str, Any]]:
    return list(client.request(known, "GET", f"{_API}/libraries")["libraries"])


def _table(found: list[dict[str, Any]]) -> None:
    counts = ("tagged", "new", "failed", "toxic", "gone")
    rows = [
        (
            one["id"],
            one["name"],
            show.state(one["state"]),
            one["tracks"],
            *(one["counts"][c] for c in counts),
            _doing(one),
        )
        for one in found
    ]
    columns = (">id", "name", "state", ">tracks", *(f">{c}" for c in counts), "")
    show.table(columns, rows, "no library yet; add one with: ostler music add DIR")


def _doing(one: dict[str, Any]) -> str:
    """What goes on, in words."""
    if scan := one["scan"]:
        return f"scanning {scan['progress']:.0%}, {scan['files']} files{_left(scan['eta_seconds'])}"
    if one["reason"]:
        return str(one["reason"])
    if one["tagging"]["left"]:
        return f"{one['tagging']['left']} to be tagged{_left(one['tagging']['eta_seconds'])}"
    return str(one["watching"] or "")


def _left(seconds: float | None) -> str:
    return "" if seconds is None else f", {show.span(seconds)} left"


def _one(found: dict[str, Any]) -> None:
    _table([found])
    print(
        f"\npath      {found['path']}\ntags go   to the {found['write_to']}\nignored   {' '.join(found['ignore']) or 'nothing'}"
    )
    print(f"watched   {'yes' if found['watch'] else 'no'}{': ' + found['watching'] if found['watching'] else ''}")
    if found["scanned_at"]:
        print(f"scanned   {show.ago(found['scanned_at'])}, in {show.span(found['took'])}")
    if found["problems"]:
        print("\nThe last scan could not look at:")
        show.table(("path", "reason"), [(p["path"], p["reason"]) for p in found["problems"]], "")


def _follow(known: Settings) -> None:
    """A bar for each library that is scanned or tagged, until none is."""
    from rich.progress import BarColumn, Progress, TextColumn  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}"),
        BarColumn(30),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[doing]}"),
    )
    with Progress(*columns, console=show.console()) as bar:
        lines: dict[int, Any] = {}
        while True:
            found = _libraries(known)
            for one in found:
                line = (
                    lines.setdefault(one["id"], bar.add_task(one["name"], total=1.0, doing=""))
                    if one["id"] not in lines
                    else lines[one["id"]]
                )
                scan, left = one["scan"], one["tagging"]["left"]
                done = scan["progress"] if scan else 1 - left / one["tracks"] if one["tracks"] else 1.0
                bar.update(line, completed=done, doing=_doing(one))
            if not any(one["scan"] or one["due"] or one["tagging"]["left"] for one in found):
                return
            time.sleep(0.5)


@music.command()
@click.argument("library")
@where
def scan(known: Settings, library: str) -> None:
    """Scan LIBRARY (id, name or path) now."""
    made = client.request(known, "POST", _path(library, "scan"))
    print(f"job {made['job']} scans library {made['library']}; follow it with: ostler jobs {made['job']} --watch")


@music.command()
@click.argument("library")
@where
def remove(known: Settings, library: str) -> None:
    """Forget LIBRARY and its tracks. No file is touched; `ostler music undo --all` before it takes away what was written."""
    gone = client.request(known, "DELETE", _path(library))
    print(f"library {gone['library']} with {gone['tracks']} tracks is forgotten; its files are as they were")
