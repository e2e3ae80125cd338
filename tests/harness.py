"""A real node in a process of its own, and ways to wait for what it does. No sleeps as synchronisation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Callable

from ostler.lifecycle import family
from ostler.store import Store

ROOT = Path(__file__).resolve().parent
APP = ROOT / "work.py"
PATIENCE = 60.0
BEHIND_PLANE = "OSTLER_TEST_PLANE"  # set it to run every node of the tests behind the data plane

# Short enough to be quick, long enough for a busy machine.
FAST = {
    "OSTLER_HEARTBEAT_INTERVAL": "0.5",
    "OSTLER_STALE_AFTER": "20",
    "OSTLER_BACKOFF_MAX": "0.1",
    "OSTLER_RETRY_BASE": "0.02",
    "OSTLER_RETRY_MAX": "0.05",
    "OSTLER_CRASH_DELAY": "0.05",
    "OSTLER_RESTART_LIMIT": "1000",
    "OSTLER_RESTART_LIFETIME": "1000",
    "OSTLER_POLL_INTERVAL": "0.5",
}


def until(found: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    """Wait for a condition; its value."""
    deadline = time.monotonic() + patience
    while True:
        value = found()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {patience:g} s in vain for {what}")
        time.sleep(0.01)


def call(url: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, method=method, headers=headers or {})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read() or b"null")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read() or b"null")


class Node:
    """One `ostler up`. Start it again after a kill: the data directory stays."""

    def __init__(self, folder: Path, app: str | Path = APP, *flags: str, **env: str) -> None:
        self.folder, self.app, self.flags = folder, app, flags
        self.env = {**os.environ, **FAST, **env}
        self.env.pop(BEHIND_PLANE, None)
        self.process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.behind_plane = bool(os.environ.get(BEHIND_PLANE))  # its clients are taken by the data plane

    # ---- the process

    def start_process(self) -> int:
        """Only the process; whether it comes up is another matter."""
        self.folder.mkdir(parents=True, exist_ok=True)
        log = (self.folder / "node.log").open("ab")
        self.process = subprocess.Popen(
            self.command(), stdout=log, stderr=log, env=self.env, cwd=self.folder, start_new_session=True
        )
        log.close()
        return self.process.pid

    def command(self) -> list[str]:
        ostler = [str(ROOT / "plane" / "behind.py")] if self.behind_plane else ["-m", "ostler"]
        up = [sys.executable, *ostler, "up", str(self.app)]
        return [*up, "--data", str(self.folder), "--port", "0", *self.flags]

    def start(self, *, ready: bool = True) -> Node:
        pid = self.start_process()
        return self.await_up(pid, ready=ready)

    def await_up(self, pid: int, *, ready: bool = True) -> Node:
        """The process that was started listens (and is ready, and its workers are well)."""
        until(lambda: self._address(pid), "the node to listen")
        if ready:
            until(lambda: self.get("/readyz")[0] == 200, "the node to be ready")
            until(lambda: all(w["status"] == "healthy" for w in self.workers()), "all workers to be healthy")
        return self

    def _address(self, pid: int) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            raise AssertionError(f"the node ended with {self.process.returncode}:\n{self.log()}")
        try:
            found = json.loads((self.folder / "node.json").read_text())
        except (OSError, ValueError):
            return False
        self.url = found["url"]
        return found["pid"] == pid

    @property
    def producer_env(self) -> dict[str, str]:
        """The environment of another process that enqueues into this node's store, with the tests' modules beside ours."""
        path = [str(ROOT), str(ROOT.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            **os.environ,
            "OSTLER_DATA": str(self.folder),
            "OSTLER_STORE": self.env.get("OSTLER_STORE", "sqlite"),
            "PYTHONPATH": os.pathsep.join(path),
        }

    def open_store(self, **how: Any) -> Store:
        """The node's store, on whichever database."""
        return Store.open(self.env.get("OSTLER_STORE", "sqlite"), self.folder, **how)

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def front_pid(self) -> int:
        """The process that takes clients' connections."""
        return int(self.worker("worker:plane:0")["pid"]) if self.behind_plane else self.pid

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, patience: float = PATIENCE) -> int:
        assert self.process is not None
        return self.process.wait(patience)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                return self.wait(40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.wait()
                raise AssertionError(f"the node did not stop within 40 s:\n{self.log()[-4000:]}") from None
        return self.process.returncode if self.process else 0

    def log(self) -> str:
        return (self.folder / "node.log").read_text(errors="replace")

    # ---- the API

    def get(self, path: str) -> tuple[int, Any]:
        return call(self.url, "GET", path)

    def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        return call(self.url, "POST", path, body, headers)

    def enqueue(self, task: str, /, **args: Any) -> int:
        options = args.pop("options", {})
        status, job = self.post("/api/v1/jobs", {"task": task, "args": args, **options})
        assert status == 201, job
        return int(job["id"])

    def job(self, job: int) -> dict[str, Any]:
        status, found = self.get(f"/api/v1/jobs/{job}")
        assert status == 200, found
        return dict(found)

    def wait_job(self, job: int, *statuses: str, patience: float = PATIENCE) -> dict[str, Any]:
        wanted = statuses or ("done", "failed", "cancelled")
        found: dict[str, Any] = {}

        def look() -> bool:
            found.update(self.job(job))
            return found["status"] in wanted

        try:
            until(look, f"job {job} to be {' or '.join(wanted)}", patience)
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {found}\n{self.log()[-3000:]}") from None
        return found

    def workers(self) -> list[dict[str, Any]]:
        return list(self.get("/api/v1/workers")[1]["workers"])

    def worker(self, component: str) -> dict[str, Any]:
        return next(w for w in self.workers() if w["component"] == component)

    def wait_worker(self, component: str, what: str, found: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        last: dict[str, Any] = {}

        def look() -> bool:
            last.clear()
            last.update(self.worker(component))
            return bool(found(last))

        try:
            until(look, f"{component}: {what}")
        except AssertionError as error:
            raise AssertionError(f"{error}; it is {last}\n{self.log()[-3000:]}") from None
        return last

    def wait_status(self, component: str, *statuses: str) -> dict[str, Any]:
        return self.wait_worker(component, f"to be {' or '.join(statuses)}", lambda w: w["status"] in statuses)

    def wait_running(self, job: int) -> dict[str, Any]:
        """The worker that runs the job, once the job's function has begun (it says so with an event)."""
        until(lambda: any(e["name"] == "begun" for e in self.job(job)["events"]), f"job {job} to begin")
        return self.worker(self.job(job)["worker"])

    def events(self, job: int, *, progress: bool = False) -> list[str]:
        return [e["name"] for e in self.job(job)["events"] if progress or e["name"] not in ("progress", "begun")]


def gone(pid: int) -> bool:
    """Whether no living process has the pid."""
    fields = family._stat(pid)
    return fields is None or fields[0] in "ZX"


def family_of(folder: Path) -> set[int]:
    """All living processes that are workers of the node there, or came out of one."""
    return {p.pid for p in family.processes() if not p.zombie and _data_of(p.pid) == str(folder)}


def _data_of(pid: int) -> str | None:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    entries = dict(e.partition(b"=")[::2] for e in environ.split(b"\0"))
    return entries.get(b"OSTLER_DATA", b"").decode() if family.VARIABLE.encode() in entries else None
