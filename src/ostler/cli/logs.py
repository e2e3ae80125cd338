"""What workers and jobs printed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

from ostler import private
from ostler.cli import client, show
from ostler.cli.options import where
from ostler.config import Settings
from ostler.errors import BadArguments, NotFound
from ostler.jobs.logs import JobLogs
from ostler.lifecycle.logs import Reader, worker_log

_ENDED = ("done", "failed", "cancelled")


@click.command()
@click.argument("worker", required=False)
@click.option("--job", type=int, help="What this job printed, instead of a worker.")
@click.option("-f", "--follow", is_flag=True, help="Go on as more comes; a job's ends with the job.")
@click.option("-n", "--lines", type=click.IntRange(1), default=40, show_default=True)
@click.option("--raw", is_flag=True, help="Print control characters as they are; they can do things to your terminal.")
@where
def logs(known: Settings, worker: str | None, job: int | None, follow: bool, lines: int, raw: bool) -> None:
    """The last output of WORKER, such as worker:tag:0, or of a job."""
    if (worker is None) == (job is None):
        raise BadArguments("name a worker, such as worker:tag:0, or a job with --job ID")
    if job is not None:
        with client.open_store(known) as opened:
            opened.jobs.find(job)
        path = JobLogs(known.data_dir).path(job)
    else:
        path = _worker_log(known, str(worker))
    reader = Reader(path)
    _print(reader.start(lines), raw)
    if reader.older:
        print(f"ostler: these are the last {lines} lines; -n NUMBER shows more", file=sys.stderr)
    if follow:
        _follow(reader, raw, lambda: job is not None and _has_ended(known, job))


def _print(lines: list[str], raw: bool) -> None:
    for line in lines:
        print(line if raw else show.harmless(line))
    sys.stdout.flush()


def _worker_log(known: Settings, worker: str) -> Path:
    pool, _, number = worker.removeprefix("worker:").rpartition(":")
    path = worker_log(known.data_dir, pool, number)
    private.check(path, write=False)
    if not pool or not path.exists():
        found = [p.stem.rpartition("-") for p in sorted(path.parent.glob("*.log"))]
        names = ", ".join(f"worker:{pool}:{number}" for pool, _, number in found)
        raise NotFound(f"there is no log of {worker!r}; there are: {names or 'none'}")
    return path


def _has_ended(known: Settings, job: int) -> bool:
    with client.open_store(known) as opened:
        return str(opened.jobs.find(job)["status"]) in _ENDED


def _follow(reader: Reader, raw: bool, ended: Callable[[], bool]) -> None:
    """Print what is added, until it can be no more."""
    while True:
        over = ended()  # before the read: what was printed until then is in it
        _print(reader.read(), raw)
        if reader.lost:
            reader.lost = False
            print("ostler: some lines came faster than they could be read, and are lost", file=sys.stderr)
        if over:
            return
        time.sleep(0.2)
