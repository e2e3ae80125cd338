"""Artifacts from the terminal: what a job has published, and the files themselves."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click

from ostler.cli import client, show
from ostler.cli.options import as_json, where
from ostler.config import Settings
from ostler.errors import BadArguments
from ostler.jobs import results
from ostler.jobs.artifacts import Reader, completed
from ostler.store.artifacts import ArtifactRow, shown

_PAGE = 500


class _Jobs(click.Group):
    """`ostler artifacts 7` is `ostler artifacts list 7`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        is_job = bool(args) and args[0].isascii() and args[0].isdigit()
        return super().resolve_command(ctx, ["list", *args] if is_job else args)


@click.group(cls=_Jobs)
def artifacts() -> None:
    """List the files that a job has published (`ostler artifacts JOB`), or read one (`ostler artifacts get KEY`)."""


@artifacts.command(name="list")
@click.argument("job", type=int)
@where
@as_json
def listing(known: Settings, job: int, json_: bool) -> None:
    """List the files that JOB has published, including those of failed runs."""
    place = results.connect(known.results, known.data_dir)
    with client.open_store(known) as opened:
        opened.jobs.find(job)
        found: list[ArtifactRow] = []
        after = ""
        while page := opened.jobs.artifacts.of(job, after, _PAGE):
            found += completed(page, place)
            after = page[-1].key
    rows = [shown(row) for row in found]
    if json_:
        show.as_json({"artifacts": rows})
        return
    columns = ("key", ">bytes", "type", "age", "sha256")
    lines = [(r["key"], f"{r['size']:,}", r["type"], show.ago(r["at"]), r["sha256"][:12]) for r in rows]
    show.table(columns, lines, f"job {job} has published nothing")
    for row in rows:
        if row["replaced_by"] is not None:
            print(f"{row['key']}: replaced by job {row['replaced_by']}")


@artifacts.command()
@click.argument("key")
@click.option("-o", "--output", default="", metavar="FILE", help="A file, a directory, or - for standard output.")
@where
def get(known: Settings, key: str, output: str) -> None:
    """Save the artifact KEY to a file (default: its own name, in this directory). Works with or without a running node."""
    with client.open_store(known) as opened:
        found = Reader(known, lambda work: work(opened)).artifact(key)
        if output == "-":
            with found.open() as file:
                shutil.copyfileobj(file, sys.stdout.buffer)
            return
        target = Path(output or key.rpartition("/")[2])
        if not output and target.exists():
            raise BadArguments(f"{target} already exists; name another file with -o, or this one to replace it")
        if not target.is_dir() and not target.absolute().parent.is_dir():
            raise BadArguments(f"there is no directory {target.parent}; create it first")
        print(f"{found.save(target)}: {found.size:,} bytes")
