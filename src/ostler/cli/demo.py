"""`ostler demo`: a node, real workers, a few jobs, one worker killed in the middle, and what became of it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from ostler import config
from ostler.cli import client, show
from ostler.config import Settings
from ostler.errors import ConfigError, OstlerError

_SIZES = [40_000_000, 90_000_000, 50_000_000, 80_000_000, 60_000_000, 70_000_000]
_PATIENCE = 180.0


@click.command()
@click.option(
    "--data", default=".ostler-demo", show_default=True, metavar="DIR", help="Its data directory; made anew each time."
)
@click.option("--port", default=0, help="Port to listen on (default: any free one).")
def demo(data: str, port: int) -> None:
    """Show what Ostler does: run jobs on real workers, kill one with SIGKILL, and watch the recovery.

    At a terminal the node stays up for a look until Ctrl-C; otherwise it ends by itself.
    """
    folder = Path(data)
    known = config.load({"data": data, "port": port})
    if client.node_url(known):
        raise ConfigError(f"a demo already runs on {folder}: {client.node_url(known)}")
    if folder.exists() and not (folder / "node.lock").exists():
        raise ConfigError(f"{folder} exists and is not a data directory of Ostler; name another with --data")
    shutil.rmtree(folder, ignore_errors=True)
    with _node(folder, port) as node:
        url = _until(lambda: client.node_url(known), node, "the node to start")
        print(f"a node is up: {url} (API docs at {url}/docs), data in {folder}/, log in {folder}/node.log\n")
        _until(lambda: _healthy(known), node, "its workers")
        jobs = [
            client.request(known, "POST", "/api/v1/jobs", {"task": "count_primes", "args": {"below": n}})["id"]
            for n in _SIZES
        ]
        killed = _follow(known, jobs, node)
        _summary(known, jobs, killed)
        if sys.stdout.isatty():
            print(f"\nThe node stays up at {url} until Ctrl-C. Try in another terminal:")
            for line in ("workers", "jobs", "enqueue count_primes below=20000000 --watch", "health"):
                print(f"  {_own_name()} {line} --data {folder}")
            with contextlib.suppress(KeyboardInterrupt):
                node.wait()
    print("the node has stopped; nothing is left running")


@contextlib.contextmanager
def _node(folder: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    folder.mkdir(parents=True)
    argv = [sys.executable, "-m", "ostler", "up", "ostler.apps.demo", "--data", str(folder), "--port", str(port)]
    with (folder / "node.log").open("wb") as log:
        node = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
    try:
        yield node
    finally:
        if node.poll() is None:
            node.send_signal(signal.SIGTERM)
            try:
                node.wait(20)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()


def _until(found: Callable[[], Any], node: subprocess.Popen[bytes], what: str) -> Any:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if node.poll() is not None:
            raise ConfigError(f"the node ended with code {node.returncode} while waiting for {what}; see its node.log")
        if value := found():
            return value
        time.sleep(0.05)
    raise ConfigError(f"waited 60 s for {what} in vain; see node.log")


def _healthy(known: Settings) -> bool:
    with contextlib.suppress(OstlerError):
        return all(w["status"] == "healthy" for w in client.request(known, "GET", "/api/v1/workers")["workers"])
    return False


def _follow(known: Settings, jobs: list[int], node: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    """Show the jobs until all have ended; kill one worker on the way."""
    from rich.progress import BarColumn, Progress, TextColumn  # noqa: PLC0415

    columns = (
        TextColumn("{task.description:<42}"),
        BarColumn(30),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[status]}"),
    )
    console = show.console()
    killed: dict[str, Any] | None = None
    deadline = time.monotonic() + _PATIENCE
    with Progress(*columns, console=console, transient=not console.is_terminal) as bar:
        lines = {job: bar.add_task(f"job {job}", total=100, status="queued") for job in jobs}
        while time.monotonic() < deadline and node.poll() is None:
            found = [client.request(known, "GET", f"/api/v1/jobs/{job}") for job in jobs]
            for job in found:
                percent = 100 if job["status"] == "done" else job["progress"] or 0
                on = f" on {job['worker']}" if job["worker"] else ""
                bar.update(
                    lines[job["id"]],
                    completed=percent,
                    description=f"job {job['id']} {job['task']}{on}",
                    status=job["status"],
                )
            if all(job["status"] in ("done", "failed", "cancelled") for job in found):
                return killed
            if killed is None:
                killed = _kill_one(known, found, bar)
            time.sleep(0.05)
    raise ConfigError("the jobs did not end in time; see node.log")


def _kill_one(known: Settings, jobs: list[dict[str, Any]], bar: Any) -> dict[str, Any] | None:
    for job in jobs:
        if job["status"] == "processing" and (job["progress"] or 0) >= 30:
            worker = next(
                (
                    w
                    for w in client.request(known, "GET", "/api/v1/workers")["workers"]
                    if w["current_job"] == job["id"]
                ),
                None,
            )
            if worker and worker["pid"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker["pid"], signal.SIGKILL)
                    bar.console.print(
                        f"--> kill -9 {worker['pid']}: {worker['component']} dies in the middle of job {job['id']}"
                    )
                    return {"job": job["id"], **worker}
    return None


def _summary(known: Settings, jobs: list[int], killed: dict[str, Any] | None) -> None:
    print()
    found = [client.request(known, "GET", f"/api/v1/jobs/{job}") for job in jobs]
    rows = []
    for job in found:
        took = (
            show.span((job["finished_at"] - job["started_at"]) / 1000)
            if job["finished_at"] and job["started_at"]
            else ""
        )
        primes = (
            f"{job['result']['primes']:,} primes below {job['result']['below']:,}"
            if job["result"]
            else (job["error"] or {}).get("message", "")
        )
        rows.append((job["id"], show.state(job["status"]), job["attempt"], job["crashes"], took, primes))
    show.table((">job", "status", ">runs", ">crashes", ">last run", "result"), rows, "no jobs")
    if killed:
        job = next(j for j in found if j["id"] == killed["job"])
        print(f"\nThe timeline of job {job['id']}, whose worker was killed:")
        for event in job["events"]:
            if event["name"] != "progress":
                print(f"  {show.clock(event['at'])}  {event['name']:<16} {_why(event)}")
    done = sum(1 for j in found if j["status"] == "done")
    print(f"\n{done} of {len(found)} jobs done, each recorded as done exactly once.")
    if done != len(found):
        raise SystemExit(1)


def _own_name() -> str:
    """How this very command can be typed."""
    program = Path(sys.argv[0])
    with contextlib.suppress(ValueError):
        return str(program.absolute().relative_to(Path.cwd()))
    return program.name


def _why(event: dict[str, Any]) -> str:
    data = event["data"] or {}
    return str(data.get("message") or data.get("worker") or "")
