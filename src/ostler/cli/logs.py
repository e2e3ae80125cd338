"""What workers and jobs printed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import click

from ostler.cli import client
from ostler.cli.options import settings, where
from ostler.config import Settings
from ostler.errors import BadArguments, NotFound
from ostler.jobs.logs import JobLogs

_ENDED = ("done", "failed", "cancelled")


@click.command()
@click.argument("worker", required=False)
@click.option("--job", type=int, help="What this job printed, instead of a worker.")
@click.option("-f", "--follow", is_flag=True, help="Go on as more comes; a job's ends with the job.")
@click.option("-n", "--lines", type=click.IntRange(1), default=40, show_default=True)
@where
def logs(
    worker: str | None,
    job: int | None,
    follow: bool,
    lines: int,
    data: str | None,
    store: str | None,
    file: Path | None,
) -> None:
    """The last output of WORKER, such as worker:tag:0, or of a job."""
    known = settings(data, store, file)
    if (worker is None) == (job is None):
        raise BadArguments("name a worker, such as worker:tag:0, or a job with --job ID")
    if job is not None:
        with client.open_store(known) as opened:
            opened.jobs.get(job)
        path = JobLogs(known.data_dir).path(job)
        shown = JobLogs(known.data_dir).read(job, lines)
    else:
        path = _worker_log(known, str(worker))
        shown = path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    for line in shown:
        print(line)
    if follow:
        _follow(path, lambda: job is not None and _has_ended(known, job))


def _worker_log(known: Settings, worker: str) -> Path:
    pool, _, number = worker.removeprefix("worker:").rpartition(":")
    folder = known.data_dir / "logs"
    path = folder / f"{pool}-{number}.log"
    if not pool or not path.exists():
        names = sorted(f"worker:{p.stem.rpartition('-')[0]}:{p.stem.rpartition('-')[2]}" for p in folder.glob("*.log"))
        raise NotFound(f"there is no log of {worker!r}; there are: {', '.join(names) or 'none'}")
    return path


def _has_ended(known: Settings, job: int) -> bool:
    with client.open_store(known) as opened:
        return str(opened.jobs.get(job)["status"]) in _ENDED


def _follow(path: Path, ended: Callable[[], bool]) -> None:
    """Print what is added. When the file is full and another takes its name, the old one is read to its end first."""
    file = path.open("rb") if path.exists() else None
    if file:
        file.seek(0, 2)
    while True:
        last = ended()
        moved = path.exists() and (file is None or path.stat().st_ino != os.fstat(file.fileno()).st_ino)
        if file and (text := file.read()):
            print(text.decode(errors="replace"), end="", flush=True)
            continue
        if moved:
            if file:
                file.close()
            file = path.open("rb")
            continue
        if last:
            return
        time.sleep(0.2)
