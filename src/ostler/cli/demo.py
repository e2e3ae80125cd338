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
from ostler.calls.address import node_url
from ostler.cli import client, show
from ostler.config import Settings
from ostler.errors import ConfigError, OstlerError

_VIDEOS = {1: "960x540", 2: "1280x720", 3: "854x480"}
_SECONDS = 20
_CUTS = ((1, 1.3, 11.3), (2, 0.7, 8.7), (3, 2.2, 14.2), (1, 6.1, 16.1), (2, 8.4, 16.4), (3, 0.0, 8.0))
_PATIENCE = 180.0
_MARK = "made-by-demo"  # a directory without this is never deleted


@click.command()
@click.argument("what", type=click.Choice(["clips", "models", "browsers", "music"]), default="clips")
@click.option(
    "--data", default=".ostler-demo", show_default=True, metavar="DIR", help="Its data directory; recreated each time."
)
@click.option("--port", default=0, help="Port to listen on (default: any free port).")
def demo(what: str, data: str, port: int) -> None:
    """Show Ostler at work: cut video clips, kill a worker with SIGKILL, and watch the recovery.

    `models`: call real models cold and warm, let two share a GPU that only fits one, kill one during a call.
    `browsers`: open pages through the browser grid while a worker is replaced, then kill a browser during a session.
    `music`: scan, tag, calibrate and search a small music library, and kill a worker while it tags.

    In a terminal the node keeps running until Ctrl-C; otherwise it stops by itself.
    """
    folder = Path(data)
    known = config.load({"data": data, "port": port})
    if node_url(known):
        raise ConfigError(
            f"a node is already running in {folder}: {node_url(known)}; stop it, or name another directory with --data"
        )
    if folder.exists() and not (folder / _MARK).exists():
        raise ConfigError(f"{folder} exists and was not created by a demo; name another directory with --data")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / _MARK).touch()
    if what == "models":
        _models(known, folder, port)
        return
    if what == "browsers":
        _browsers(known, folder, port)
        return
    if what == "music":
        _music(known, folder, port)
        return
    videos = (folder / "videos").absolute()
    videos.mkdir()
    with _node(folder, port, "ostler.apps.clips", {"OSTLER_CLIPS_ROOTS": str(videos)}) as node:
        _make_videos(videos)
        url = _until(lambda: node_url(known), node, "the node to start")
        print(f"a node is up; dashboard: {url}/ (API: {url}/docs), data in {folder}/, log in {folder}/node.log\n")
        _until(lambda: _healthy(known), node, "its workers")
        wanted = [{"source": str(videos / f"sample{n}.mp4"), "start": start, "end": end} for n, start, end in _CUTS]
        jobs = [client.request(known, "POST", "/api/v1/clips", cut)["id"] for cut in wanted]
        killed = _follow(known, jobs, node)
        _summary(known, jobs, killed, folder)
        if sys.stdout.isatty():
            print(f"\nThe node stays up until Ctrl-C. Look at {url}/, or try in another terminal:")
            again = f"enqueue clip source={videos}/sample2.mp4 start=3 end=15 --watch"
            for line in ("top", "events", again, "jobs"):
                print(f"  {_own_name()} {line} --data {folder}")
            with contextlib.suppress(KeyboardInterrupt):
                node.wait()
    print("the node has stopped; nothing is left running")


def _models(known: Settings, folder: Path, port: int) -> None:
    from ostler.cli import demo_models  # noqa: PLC0415

    with _node(folder, port, demo_models.TARGET, demo_models.prepare(folder)) as node:
        url = _until(lambda: node_url(known), node, "the node to start")
        print(f"a node is up; dashboard: {url}/ (API: {url}/docs), data in {folder}/, log in {folder}/node.log")
        _until(lambda: _healthy(known), node, "its workers")
        demo_models.run(known, folder)
        if sys.stdout.isatty():
            print(f"\nThe node stays up until Ctrl-C. Look at {url}/, or call it yourself:")
            body = '{"payload": {"texts": ["hello"]}}'
            print(f"  curl {url}/api/v1/calls/embedding -H 'content-type: application/json' -d '{body}'")
            with contextlib.suppress(KeyboardInterrupt):
                node.wait()
    print("the node has stopped; nothing is left running")


def _browsers(known: Settings, folder: Path, port: int) -> None:
    from ostler.cli import demo_browsers  # noqa: PLC0415

    with _node(folder, port, demo_browsers.TARGET, demo_browsers.prepare()) as node:
        url = _until(lambda: node_url(known), node, "the node to start")
        print(f"a node is up; dashboard: {url}/ (API: {url}/docs), data in {folder}/, log in {folder}/node.log")
        _until(lambda: _healthy(known), node, "its workers")
        demo_browsers.run(known, url, folder)
        if sys.stdout.isatty():
            print(f"\nThe node stays up until Ctrl-C. Look at {url}/, or connect to it:")
            print(f'  playwright.chromium.connect("{url.replace("http", "ws", 1)}/sessions/{demo_browsers.POOL}")')
            with contextlib.suppress(KeyboardInterrupt):
                node.wait()
    print("the node has stopped; nothing is left running")


def _music(known: Settings, folder: Path, port: int) -> None:
    from ostler.cli import demo_music  # noqa: PLC0415

    with _node(folder, port, demo_music.TARGET, demo_music.prepare(folder)) as node:
        url = _until(lambda: node_url(known), node, "the node to start")
        print(f"a node is up; dashboard: {url}/ (API: {url}/docs), data in {folder}/, log in {folder}/node.log")
        _until(lambda: _healthy(known), node, "its workers")
        demo_music.run(known, folder)
        if sys.stdout.isatty():
            print(f"\nThe node stays up until Ctrl-C. Look at {url}/music, or try in another terminal:")
            for line in ("music status", "music search instrumental", "music calibrate music --dry-run"):
                print(f"  {_own_name()} {line} --data {folder}")
            with contextlib.suppress(KeyboardInterrupt):
                node.wait()
    print("the node has stopped; nothing is left running")


@contextlib.contextmanager
def _node(folder: Path, port: int, target: str, variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    argv = [sys.executable, "-m", "ostler", "up", target, "--data", str(folder), "--port", str(port)]
    with (folder / "node.log").open("wb") as log:
        env = {k: v for k, v in os.environ.items() if k not in ("OSTLER_STORE", "OSTLER_HOST", "OSTLER_CONFIG")}
        node = subprocess.Popen(argv, stdout=log, stderr=log, env={**env, **variables}, start_new_session=True)
    try:
        yield node
    except KeyboardInterrupt:
        print("\ninterrupted; the node is stopped")
    finally:
        if node.poll() is None:
            node.send_signal(signal.SIGTERM)
            try:
                node.wait(20)
            except subprocess.TimeoutExpired:
                node.kill()
                node.wait()


def _make_videos(folder: Path) -> None:
    """Sample videos, made by ffmpeg itself: nothing is downloaded and none is shipped."""
    from ostler.apps.clips.media import ffmpeg  # noqa: PLC0415
    from ostler.apps.clips.rules import Rules  # noqa: PLC0415

    program = ffmpeg(Rules.from_environment({}))
    print(f"making {len(_VIDEOS)} sample videos of {_SECONDS} s …")
    for number, size in _VIDEOS.items():
        inputs = ["-f", "lavfi", "-i", f"testsrc2=s={size}:r=25", "-f", "lavfi", "-i", f"sine=f={220 * number}"]
        codecs = [
            "-t",
            str(_SECONDS),
            "-c:v",
            "libx264",
            "-preset",
            "ultrafast",
            "-pix_fmt",
            "yuv420p",
            "-c:a",
            "aac",
            "-shortest",
        ]
        to = folder / f"sample{number}.mp4"
        subprocess.run([program, "-nostdin", "-y", "-loglevel", "error", *inputs, *codecs, str(to)], check=True)


def _until(found: Callable[[], Any], node: subprocess.Popen[bytes], what: str) -> Any:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if node.poll() is not None:
            raise ConfigError(f"the node ended with code {node.returncode} while waiting for {what}; see its node.log")
        if value := found():
            return value
        time.sleep(0.05)
    raise ConfigError(f"gave up after waiting 60 s for {what}; see node.log")


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
                    bar.console.print(f"--> kill -9 {worker['pid']}: {worker['component']} dies during job {job['id']}")
                    return {"job": job["id"], **worker}
    return None


def _summary(known: Settings, jobs: list[int], killed: dict[str, Any] | None, folder: Path) -> None:
    print()
    found = [client.request(known, "GET", f"/api/v1/jobs/{job}") for job in jobs]
    rows = []
    for job in found:
        took = (
            show.span((job["finished_at"] - job["started_at"]) / 1000)
            if job["finished_at"] and job["started_at"]
            else ""
        )
        clip = job["result"]
        what = (
            f"{clip['seconds']:.1f} s, {clip['bytes'] / 1e6:.1f} MB, {clip['mode']}"
            if clip
            else (job["error"] or {}).get("message", "")
        )
        where = f"{folder}/results/{clip['key']}" if clip else ""
        rows.append((job["id"], show.state(job["status"]), job["attempt"], job["crashes"], took, what, where))
    show.table((">job", "status", ">attempt", ">crashes", ">last run", "clip", "where"), rows, "no jobs")
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
