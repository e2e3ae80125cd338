"""The music tagger from the terminal. All of it is asked of the node that runs `ostler.apps.music`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import click

from ostler.cli import client, show
from ostler.cli.options import as_json, where
from ostler.config import Settings
from ostler.errors import ConfigError, InputError, NotFound

_API = "/api/v1"


@click.group()
def music() -> None:
    """Tag a music library: scan, tag, calibrate, search. Needs a node: ostler up ostler.apps.music."""


def _ask(known: Settings, method: str, path: str, body: Any = None) -> Any:
    try:
        return client.request(known, method, path, body)
    except NotFound as error:
        if str(error).endswith(": Not Found"):  # not a library or a track, but the route
            raise ConfigError(
                "this node does not run the music tagger; start one with: ostler up ostler.apps.music"
            ) from None
        raise


def _path(known: Settings, library: str, *more: str) -> str:
    """The URL of a library. A path cannot be a part of one: then its id is looked up."""
    if "/" in library:
        names = {str(one["id"]): {one["name"], one["path"]} for one in _libraries(known)}
        wanted = {library, os.path.abspath(library)}  # noqa: PTH100  links in it are the node's business
        library = next((number for number, called in names.items() if called & wanted), library)
    return "/".join((f"{_API}/libraries/{quote(library, safe='')}", *more))


@music.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--name", help="What to call it (default: the directory's name).")
@click.option(
    "--write-to",
    type=click.Choice(["database", "file", "sidecar"]),
    help="Where to write tags: only the database (default), the files' own metadata, or a file next to each.",
)
@click.option("--ignore", multiple=True, metavar="PATTERN", help="Ignore these files; can be repeated.")
@click.option("--watch/--no-watch", default=True, help="Rescan it when something in it changes (default: yes).")
@where
@as_json
def add(known: Settings, folder: Path, json_: bool, **wishes: Any) -> None:
    """Add DIR as a library: its files are scanned, and each is tagged."""
    wishes["ignore"] = list(wishes["ignore"]) or None
    body = {"path": os.path.abspath(folder), **{name: value for name, value in wishes.items() if value is not None}}  # noqa: PTH100
    made = _ask(known, "POST", f"{_API}/libraries", body)
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
    """Show libraries with their tracks and progress; for one LIBRARY (id, name or path), also what could not be read."""
    if json_:
        show.as_json(_ask(known, "GET", _path(known, library) if library else f"{_API}/libraries"))
    elif library:
        _one(_ask(known, "GET", _path(known, library)))
    elif watch:
        _follow(known)
    else:
        _table(_libraries(known))


def _libraries(known: Settings) -> list[dict[str, Any]]:
    return list(_ask(known, "GET", f"{_API}/libraries")["libraries"])


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
        f"\npath      {found['path']}\ntags      written to the {found['write_to']}\nignored   {' '.join(found['ignore']) or 'nothing'}"
    )
    print(f"watched   {'yes' if found['watch'] else 'no'}{': ' + found['watching'] if found['watching'] else ''}")
    if found["scanned_at"]:
        print(f"scanned   {show.ago(found['scanned_at'])}, in {show.span(found['took'])}")
    if found["problems"]:
        print("\nThe last scan could not read:")
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
                if one["id"] not in lines:
                    lines[one["id"]] = bar.add_task(one["name"], total=1.0, doing="")
                scan, left = one["scan"], one["tagging"]["left"]
                done = scan["progress"] if scan else 1 - left / max(1, one["tracks"])
                bar.update(lines[one["id"]], completed=done, doing=_doing(one))
            if not any(one["scan"] or one["due"] or one["tagging"]["left"] for one in found):
                return
            time.sleep(0.5)


@music.command()
@click.argument("library")
@where
def scan(known: Settings, library: str) -> None:
    """Scan LIBRARY (id, name or path) now."""
    made = _ask(known, "POST", _path(known, library, "scan"))
    print(f"job {made['job']} scans library {made['library']}; follow it with: ostler jobs {made['job']} --watch")


@music.command()
@click.argument("library")
@click.option("--name", help="Its new name.")
@click.option("--write-to", type=click.Choice(["database", "file", "sidecar"]), help="Move its tags there.")
@click.option(
    "--ignore",
    multiple=True,
    metavar="PATTERN",
    help="Ignore these files instead of those set before; can be repeated.",
)
@click.option("--watch/--no-watch", default=None, help="Rescan it when something in it changes.")
@where
def change(known: Settings, library: str, **wishes: Any) -> None:
    """Change the options of LIBRARY."""
    wishes["ignore"] = list(wishes["ignore"]) or None
    body = {name: value for name, value in wishes.items() if value is not None}
    if not body:
        raise click.UsageError(
            "nothing to change; give at least one of --name, --write-to, --ignore, --watch or --no-watch"
        )
    _one({**_ask(known, "PATCH", _path(known, library), body), "problems": []})


@music.command()
@click.argument("library")
@where
def remove(known: Settings, library: str) -> None:
    """Forget LIBRARY and its tracks. No file is touched; to remove written tags, run `ostler music undo --all` first."""
    gone = _ask(known, "DELETE", _path(known, library))
    print(f"library {gone['library']} with {gone['tracks']} tracks is forgotten; its files are unchanged")


# ---- tagging


@music.command()
@click.argument("library", required=False)
@click.option("--track", type=int, help="Only this track.")
@click.option("--all", "whole", is_flag=True, help="Tagged ones too: after a change of the model, or of permissions.")
@where
def retry(known: Settings, library: str | None, track: int | None, whole: bool) -> None:
    """Retry the failed and toxic tracks of LIBRARY."""
    if track is not None:
        _ask(known, "POST", f"{_API}/tracks/{track}/retry")
        print(f"track {track} will be tagged again")
    elif library is not None:
        found = _ask(known, "POST", _path(known, library, f"retry?all={str(whole).lower()}"))
        print(f"{found['tracks']} tracks of library {found['library']} will be tagged again")
    else:
        raise click.UsageError("name a LIBRARY, or a track with --track")


@music.command()
@where
def fetch(known: Settings) -> None:
    """Download the default model (29 MB) into the data directory."""
    from ostler.apps.music import weights  # noqa: PLC0415
    from ostler.apps.music.rules import Rules  # noqa: PLC0415

    for path in weights.fetch(Rules.from_environment().models_in(known.data_dir)):
        print(path)


@music.command()
@click.argument("library")
@click.option("--dry-run", is_flag=True, help="Show what would change; change nothing.")
@where
@as_json
def calibrate(known: Settings, library: str, dry_run: bool, json_: bool) -> None:
    """Find a threshold for each tag from LIBRARY's own scores, and rewrite the tags accordingly."""
    made = _ask(known, "POST", _path(known, library, f"calibrate?dry_run={str(dry_run).lower()}"))
    result = _ended(known, made["job"])
    if json_:
        show.as_json(result)
        return
    rows = [
        (
            one["tag"],
            f"{one['before']:.2f}",
            f"{one['after']:.2f}",
            one["method"],
            one["tracks_before"],
            one["tracks_after"],
        )
        for one in sorted(result["tags"], key=lambda one: -one["tracks_after"])
    ]
    show.table(("tag", ">before", ">after", "by", ">tracks before", ">after"), rows, "the model has no tags")
    verb = "would get" if dry_run else "get"
    print(f"\n{result['changed']} of {result['files']} tracks {verb} different tags ({result['model']})")


def _ended(known: Settings, job: int) -> Any:
    """A job's result, when it has ended."""
    while True:
        found = _ask(known, "GET", f"{_API}/jobs/{job}?wait=30")
        if found["status"] == "done":
            return found["result"]
        if found["status"] in ("failed", "cancelled"):
            raise InputError((found["error"] or {}).get("message") or f"job {job} was {found['status']}")


@music.command()
@click.argument("library")
@click.option(
    "--all", "whole", is_flag=True, help="Remove all tags that were ever written for it, and stop writing to files."
)
@where
def undo(known: Settings, library: str, whole: bool) -> None:
    """Undo the last calibration of LIBRARY, or everything that was written to its files and sidecar files."""
    found = _ask(known, "POST", _path(known, library, f"undo?all={str(whole).lower()}"))
    if whole:
        print(
            f"the tags of {found['tracks']} tracks are taken away (job {found['job']}); from now on they are in the database alone"
        )
    else:
        print(f"calibration {found['calibration']} is undone; job {found['job']} rewrites the tags")


# ---- searching


def _wanted(function: Any) -> Any:
    for option in (
        click.argument("tags", nargs=-1, metavar="[TAG[:SCORE]]…"),
        click.option("--without", multiple=True, metavar="TAG", help="A tag that tracks must not have."),
        click.option("--text", default="", help="Words in the path, title, artist or album."),
        click.option("--library", help="Only in this library (id or name)."),
        click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True),
    ):
        function = option(function)
    return function


def _asked(
    tags: tuple[str, ...], without: tuple[str, ...], text: str, library: str | None, limit: int, **more: Any
) -> str:
    given: list[tuple[str, Any]] = [*(("tag", tag) for tag in tags), *(("without", tag) for tag in without)]
    given += [("text", text), ("library", library), ("limit", limit), *more.items()]
    return urlencode([(name, value) for name, value in given if value not in (None, "", False)])


@music.command()
@_wanted
@click.option(
    "--state", type=click.Choice(["new", "tagged", "failed", "toxic", "gone"]), help="Only tracks in this state."
)
@where
@as_json
def search(known: Settings, json_: bool, **wanted: Any) -> None:
    """Find tracks with all these tags, highest scores first. A TAG without a SCORE uses its threshold."""
    found = _ask(known, "GET", f"{_API}/tracks?{_asked(**wanted)}")["tracks"]
    if json_:
        show.as_json(found)
    elif wanted["state"] in ("failed", "toxic"):
        show.table(
            (">id", "library", "path", "reason"),
            [(t["id"], t["library_name"], t["path"], t["reason"]) for t in found],
            "none",
        )
    else:
        _list(found, lambda track: " ".join(f"{tag} {score:.2f}" for tag, score in track.get("scores", {}).items()))


@music.command()
@click.argument("track", type=int)
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@where
@as_json
def similar(known: Settings, track: int, limit: int, json_: bool) -> None:
    """Find tracks that sound like TRACK (an id that `search` shows), most similar first."""
    found = _ask(known, "GET", f"{_API}/tracks/{track}/similar?limit={limit}")["tracks"]
    if json_:
        show.as_json(found)
    else:
        _list(found, lambda one: f"{one['similarity']:.3f}")


def _list(found: list[dict[str, Any]], last: Callable[[dict[str, Any]], str]) -> None:
    rows = [(t["id"], t["artist"], t["title"], t["path"], last(t)) for t in found]
    show.table((">id", "artist", "title", "path", ""), rows, "no track fits")


@music.command()
@_wanted
@click.option("--similar", type=int, metavar="TRACK", help="Tracks that sound like this one, instead of tags.")
@click.option("--relative", is_flag=True, help="Write paths relative to the library's root.")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="NAME.m3u8, or NAME.nsp for Navidrome."
)
@where
def playlist(known: Settings, output: Path, **wanted: Any) -> None:
    """Write the results of a search to a playlist: M3U, or a smart playlist that Navidrome evaluates itself."""
    path = f"{_API}/playlists/{quote(output.name, safe='')}?{_asked(**wanted)}"
    with client.reply(known, "GET", path) as response:
        data = response.read()
    output.write_bytes(data)
    print(
        f"{output}: {sum(1 for line in data.splitlines() if line.startswith(b'#EXTINF'))} tracks"
        if output.suffix != ".nsp"
        else output
    )
