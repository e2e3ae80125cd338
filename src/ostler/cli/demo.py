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

from ostler import config, extras
from ostler.calls.address import node_url
from ostler.cli import client, show
from ostler.config import Settings
from ostler.errors import ConfigError, OstlerError

_VIDEOS = {1: "960x540", 2: "1280x720", 3: "854x480"}
_SECONDS = 20
_CUTS = ((1, 1.3, 11.3), (2, 0.7, 8.7), (3, 2.2, 14.2), (1, 6.1, 16.1), (2, 8.4, 16.4), (3, 0.0, 8.0))
_STEPS = (20, 15, 15, 10)
_PATIENCE = 180.0
_LAST = 8  # lines of the log of a node that did not start
_MARK = "made-by-demo"  # a directory without this is never deleted


@click.command()
@click.argument("what", type=click.Choice(["clips", "jobs", "models", "browsers", "music"]), required=False)
@click.option(
    "--data", default=".ostler-demo", show_default=True, metavar="DIR", help="Its data directory; recreated each time."
)
@click.option("--port", default=0, help="Port to listen on (default: any free port).")
def demo(what: str | None, data: str, port: int) -> None:
    r"""Show Ostler at work: run jobs, kill a worker with SIGKILL, and watch the recovery.

    \b
    clips     cut video clips (the default, where the extra `clips` is installed)
    jobs      jobs that only wait (the default otherwise)
    models    call real models cold and warm, let two share a GPU that only fits one, kill one during a call
    browsers  open pages through the browser grid while a worker is replaced, then kill a browser during a session
    music     scan, tag, calibrate and search a small music library, and kill a worker while it tags

    In a terminal the node keeps running until Ctrl-C; otherwise it stops by itself.
    """
    chosen = what or _possible()
    if chosen in _NEEDS:
        _NEEDS[chosen]()
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
    _DEMOS[chosen](known, folder, port)
    print("the node has stopped; nothing is left running")


def _need_clips() -> None:
    from ostler.apps.clips.media import check_installed  # noqa: PLC0415
    from ostler.apps.clips.rules import Rules  # noqa: PLC0415

    check_installed(Rules.from_environment({}))


def _possible() -> str:
    """The demo to show where none is named."""
    try:
        _need_clips()
    except ConfigError:
        print(f"this demo runs jobs that only wait; to see video clips cut instead: {extras.command('clips')}")
        return "jobs"
    return "clips"


_NEEDS: dict[str, Callable[[], None]] = {
    "clips": _need_clips,
    "browsers": lambda: extras.require("browsers", "this demo"),
    "music": lambda: extras.require("music", "this demo"),
}


def _clips(known: Settings, folder: Path, port: int) -> None:
    videos = (folder / "videos").absolute()
    videos.mkdir()
    _make_videos(videos)
    with _served(known, folder, port, "ostler.apps.clips", {"OSTLER_CLIPS_ROOTS": str(videos)}) as (node, url):
        wanted = [{"source": str(videos / f"sample{n}.mp4"), "start": start, "end": end} for n, start, end in _CUTS]
        jobs = [client.request(known, "POST", "/api/v1/clips", cut)["id"] for cut in wanted]
        killed = _follow(known, jobs, node)
        _summary(known, jobs, killed, folder)
        again = f"enqueue clip source={videos}/sample2.mp4 start=3 end=15 --watch"
        _stay(node, f"Look at {url}/", *_typed(folder, "top", "events", again, "jobs"))


def _jobs(known: Settings, folder: Path, port: int) -> None:
    with _served(known, folder, port, "ostler.apps.steps", {}) as (node, url):
        wanted = [{"task": "work", "args": {"steps": steps}} for steps in _STEPS]
        jobs = [client.request(known, "POST", "/api/v1/jobs", job)["id"] for job in wanted]
        killed = _follow(known, jobs, node)
        _summary(known, jobs, killed, folder)
        _stay(node, f"Look at {url}/", *_typed(folder, "top", "events", "enqueue work steps=50 --watch", "jobs"))


def _models(known: Settings, folder: Path, port: int) -> None:
    from ostler.cli import demo_models  # noqa: PLC0415

    with _served(known, folder, port, demo_models.TARGET, demo_models.prepare(folder)) as (node, url):
        demo_models.run(known, folder)
        body = '{"payload": {"texts": ["hello"]}}'
        again = f"curl {url}/api/v1/calls/embedding -H 'content-type: application/json' -d '{body}'"
        _stay(node, f"Look at {url}/", again)


def _browsers(known: Settings, folder: Path, port: int) -> None:
    from ostler.cli import demo_browsers  # noqa: PLC0415

    with _served(known, folder, port, demo_browsers.TARGET, demo_browsers.prepare()) as (node, url):
        demo_browsers.run(known, url, folder)
        address = f"{url.replace('http', 'ws', 1)}/sessions/{demo_browsers.POOL}"
        _stay(node, f"Look at {url}/", f'playwright.chromium.connect("{address}")')


def _music(known: Settings, folder: Path, port: int) -> None:
    from ostler.cli import demo_music  # noqa: PLC0415

    with _served(known, folder, port, demo_music.TARGET, demo_music.prepare(folder)) as (node, url):
        demo_music.run(known, folder)
        lines = ("music status", "music search instrumental", "music calibrate music --dry-run")
        _stay(node, f"Look at {url}/music", *_typed(folder, *lines))


_DEMOS = {"clips": _clips, "jobs": _jobs, "models": _models, "browsers": _browsers, "music": _music}


@contextlib.contextmanager
def _served(
    known: Settings, folder: Path, port: int, target: str, variables: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A node whose workers are healthy, and its URL."""
    with _node(folder, port, target, variables) as node:
        url = _until(lambda: node_url(known), node, "the node to start", folder)
        print(f"a node is up; dashboard: {url}/ (API: {url}/docs), data in {folder}/, log in {folder}/node.log\n")
        _until(lambda: _healthy(known), node, "its workers", folder)
        yield node, url


def _typed(folder: Path, *commands: str) -> list[str]:
    return [f"{_own_name()} {command} --data {folder}" for command in commands]


def _stay(node: subprocess.Popen[bytes], look: str, *lines: str) -> None:
    """In a terminal, keep the node until Ctrl-C."""
    if not sys.stdout.isatty():
        return
    print(f"\nThe node stays up until Ctrl-C. {look}, or try in another terminal:")
    for line in lines:
        print(f"  {line}")
    with contextlib.suppress(KeyboardInterrupt):
        node.wait()


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


def _until(found: Callable[[], Any], node: subprocess.Popen[bytes], what: str, folder: Path) -> Any:
    deadline = time.monotonic() + 60
    log = folder / "node.log"
    while time.monotonic() < deadline:
        if node.poll() is not None:
            lines = log.read_text("utf-8", "replace").strip().splitlines()[-_LAST:]
            end = "\n".join(f"  {line}" for line in lines)
            raise ConfigError(
                f"the node ended with code {node.returncode} while waiting for {what}; the end of {log}:\n{end}"
            )
        if value := found():
            return value
        time.sleep(0.05)
    raise ConfigError(f"gave up after waiting 60 s for {what}; see {log}")


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
        if isinstance(clip, dict):
            what = (
                f"{clip['seconds']:.1f} s, {clip['bytes'] / 1e6:.1f} MB, {clip['mode']}, {folder}/results/{clip['key']}"
            )
        else:
            what = clip or (job["error"] or {}).get("message", "")
        rows.append((job["id"], show.state(job["status"]), job["attempt"], job["crashes"], took, what))
    show.table((">job", "status", ">attempt", ">crashes", ">last run", "result"), rows, "no jobs")
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
