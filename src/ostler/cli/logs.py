"""What workers and jobs printed."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ostler import private
from ostler.cli import client, show
from ostler.cli.options import where
from ostler.config import Settings
from ostler.errors import BadArguments, NotFound
from ostler.lifecycle.logs import Reader, worker_log
from ostler.live import remote
from ostler.store import fleet, home
from ostler.store.database import is_postgres

_ENDED = ("done", "failed", "cancelled")


@click.command()
@click.argument("worker", required=False)
@click.option("--job", type=int, help="Show what this job printed.")
@click.option("-f", "--follow", is_flag=True, help="Keep printing new lines; for a job, until it ends.")
@click.option("-n", "--lines", type=click.IntRange(1), default=40, show_default=True)
@click.option("--raw", is_flag=True, help="Print control characters unchanged; they can affect your terminal.")
@where
def logs(known: Settings, worker: str | None, job: int | None, follow: bool, lines: int, raw: bool) -> None:
    """Show the last output of WORKER (such as worker:tag:0 or n2/worker:tag:0), of the workers of a pool, or of a job.

    Logs of other nodes are read over HTTP.
    """
    if (worker is None) == (job is None):
        raise BadArguments("name a worker, such as worker:tag:0, or a job with --job ID")
    if worker is not None and worker.isdigit():
        raise BadArguments(f"{worker} is not a worker; what job {worker} printed: ostler logs --job {worker}")
    names = [str(worker)] if job is not None else _named(known, str(worker))
    if follow and len(names) > 1:
        raise BadArguments(f"--follow follows one worker; name one of {', '.join(names)}")
    for name in names:
        if len(names) > 1:
            _say(name)
        node, subject = _place(known, name) if job is None else _place_of_job(known, job)
        if node is None:
            _print_file(known, subject, lines, raw, follow=follow, job=job)
        else:
            _print_far(known, node, subject, lines, raw, follow=follow, job=job)


def _print_file(known: Settings, subject: str, lines: int, raw: bool, *, follow: bool, job: int | None) -> None:
    reader = Reader(remote.path_of(known.data_dir, subject))
    found = reader.start(lines)
    _print(found, raw)
    if not found and job is not None and not follow:
        _say(f"job {job} has printed nothing; ostler jobs {job} shows its timeline and its errors")
    if reader.older:
        _say(f"these are the last {lines} lines; -n NUMBER shows more")
    if follow:
        _follow(reader, raw, lambda: job is not None and _has_ended(known, job))


def _print_far(
    known: Settings, node: dict[str, Any], subject: str, lines: int, raw: bool, *, follow: bool, job: int | None
) -> None:
    """The log of another node, which is asked over HTTP."""
    secret, place = _secret(known), None
    while True:
        over = not follow or (job is not None and _has_ended(known, job))
        found = remote.ask(node, secret, "the command line", subject, min(lines, 10_000), place)
        _print(found.lines, raw)
        if place is None:
            _say(f"this is from node {node['label']}" + (", which ran it last" if job is not None else ""))
        if found.older and place is None:
            _say(f"these are the last {len(found.lines)} lines")
        if found.lost:
            _say("some lines came faster than they could be read, and are lost")
        place = found.place or place
        if over:
            return
        time.sleep(0.5)


def _secret(known: Settings) -> str:
    with client.open_store(known) as opened:
        return opened.meta.get(remote.SECRET) or ""


def _say(words: str) -> None:
    print(f"ostler: {words}", file=sys.stderr)


def _print(lines: list[str], raw: bool) -> None:
    for line in lines:
        print(line if raw else show.harmless(line))
    sys.stdout.flush()


def _named(known: Settings, name: str) -> list[str]:
    """The workers that are meant: of a pool, all of them."""
    if ":" in name:
        return [name]
    if not is_postgres(known.store) and "/" not in name:
        found = [path.stem.rpartition("-") for path in worker_log(known.data_dir, name, 0).parent.glob("*.log")]
        return sorted(f"worker:{pool}:{number}" for pool, _, number in found if pool == name) or [name]
    with client.open_store(known) as opened:
        return [worker["name"] for worker in fleet.read(opened).several_named(name)]


def _place(known: Settings, worker: str) -> tuple[dict[str, Any] | None, str]:
    """The node that has the log of a worker (None: it is here), and the worker."""
    pool, _, number = worker.removeprefix("worker:").rpartition(":")
    if not is_postgres(known.store) and "/" not in worker:
        _require(worker_log(known.data_dir, pool, number), worker, pool)
        return None, f"worker:{pool}:{number}"
    with client.open_store(known) as opened:
        found = fleet.read(opened)
    row = found.worker(worker)
    node = found.node(row["node_id"])
    return (None if _is_here(known, node) else node), row["component"]


def _place_of_job(known: Settings, job: int) -> tuple[dict[str, Any] | None, str]:
    with client.open_store(known) as opened:
        opened.jobs.find(job)
        node = remote.holder(opened, fleet.read(opened), job) if opened.db.shared else None
    return (None if node is None or _is_here(known, node) else node), f"job:{job}"


def _is_here(known: Settings, node: dict[str, Any]) -> bool:
    """Whether the node uses, or used, the data directory that we are asked about."""
    with contextlib.suppress(OSError):
        return bool((home(known.store, known.data_dir) / "home").read_text(encoding="ascii").strip() == node["home"])
    return False


def _require(path: Path, worker: str, pool: str) -> None:
    private.check(path, write=False)
    if not pool or not path.exists():
        found = [p.stem.rpartition("-") for p in sorted(path.parent.glob("*.log"))]
        names = ", ".join(f"worker:{pool}:{number}" for pool, _, number in found)
        raise NotFound(f"there is no log of {worker!r}; there are: {names or 'none'}")


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
            _say("some lines came faster than they could be read, and are lost")
        if over:
            return
        time.sleep(0.2)
