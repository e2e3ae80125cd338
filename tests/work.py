"""The jobs that tests run on real workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

from ostler import Cancel, Cancelled, Fail, Job, Ostler, Retry

app = Ostler()


@app.job(queue="work")
def add(job: Job, a: int, b: int = 1) -> int:
    return a + b


@app.job(queue="work")
def noop(job: Job) -> None: ...


@app.job(queue="other")
def other(job: Job, say: str = "hello") -> str:
    print(say)
    return say


@app.job(queue="work")
async def add_async(job: Job, a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


_beside: set[int] = set()


@app.job(queue="work")
async def company(job: Job) -> int:
    """How many jobs this worker runs at once."""
    _beside.add(job.id)
    await asyncio.sleep(0.01)
    found = len(_beside)
    _beside.remove(job.id)
    return found


@app.job(queue="work")
def mark(job: Job, path: str) -> int:
    """Leave a line for each run."""
    with open(path, "a") as file:
        file.write(f"{job.id} {job.attempt} {os.getpid()}\n")
    return job.attempt


@app.job(queue="work")
def wait_for(job: Job, path: str, children: int = 0) -> str:
    """Run until the file exists, with children of its own, each in another session."""
    kids = [subprocess.Popen(["sleep", "300"], start_new_session=bool(i % 2)) for i in range(children)]
    if children:
        subprocess.run([sys.executable, "-c", _DAEMON], check=True)
    job.event("begun", {"pid": os.getpid(), "kids": [k.pid for k in kids]})
    while not Path(path).exists():
        time.sleep(0.01)
    for kid in kids:
        kid.kill()
        kid.wait()
    return "seen"


@app.job(queue="work")
def ticks(job: Job, path: str, until: str) -> None:
    """A byte into the file each tenth of a second, until the other file exists."""
    with open(path, "ab", buffering=0) as file:
        job.event("begun")
        while not Path(until).exists():
            file.write(b".")
            time.sleep(0.1)


_DAEMON = "import os,subprocess; subprocess.Popen(['sleep','301'], start_new_session=True)"


@app.job(queue="work")
def stubborn(job: Job, path: str) -> None:
    """Ignores SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    job.event("begun")
    while not Path(path).exists():
        time.sleep(0.01)


@app.job(queue="work")
def tidy(job: Job, path: str) -> None:
    """Cleans up when it is asked to go."""
    job.event("begun")
    try:
        while True:
            time.sleep(0.01)
    finally:
        Path(path).write_text("tidied")


@app.job(queue="work", attempts=3)
def crash(job: Job, code: int = 9, times: int = 1000) -> str:
    if job.crashes < times:
        print("last words of", job.id, flush=True)
        if code == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(code)
    return "survived"


@app.job(queue="work", attempts=3)
def fails(job: Job, times: int = 1000) -> int:
    if job.attempt <= times:
        raise OSError(f"try {job.attempt} failed")
    return job.attempt


@app.job(queue="work")
def tells(job: Job, times: int, size: int) -> None:
    """Much of it."""
    for n in range(times):
        job.event("told", {"n": n, "text": "x" * size})


@app.job(queue="work", attempts=5)
def gives_up(job: Job) -> None:
    raise Fail("VALIDATION", "this can never work")


@app.job(queue="work", attempts=4)
def asks_again(job: Job) -> int:
    if job.attempt < 3:
        raise Retry("not yet", after=0.01)
    return job.attempt


@app.job(queue="work")
def returns(job: Job, what: str) -> object:
    if what == "nested":
        return json.loads("[" * 960 + "]" * 960)
    return {"set": {1, 2}, "nan": float("nan"), "big": "x" * 2_000_000, "exit": None, "deep": {"a": [1, None]}}[what]


@app.job(queue="work", attempts=1)
def exits(job: Job) -> None:
    sys.exit(3)


@app.job(queue="work", attempts=2, timeout=1.0)
def overruns(job: Job, times: int = 1000) -> str:
    if job.attempt <= times:
        child = subprocess.Popen(["sleep", "300"])
        job.event("child", child.pid)
        time.sleep(300)
    return "in time"


@app.job(queue="work")
def counts(job: Job, to: int = 50) -> int:
    for i in range(to):
        job.progress(100 * (i + 1) / to, f"step {i + 1}")
    return to


@app.job(queue="work")
def listens(job: Job) -> None:
    """Heeds a cancel."""
    job.event("begun")
    while True:
        job.check()
        time.sleep(0.005)


@app.job(queue="work")
async def listens_async(job: Job) -> None:
    job.event("begun")
    await asyncio.sleep(300)


@app.job(queue="work")
def enqueues(job: Job, a: int) -> int:
    return int(add.enqueue(a=a, b=1))


@app.job(queue="work")
def grows(job: Job, mb: int) -> int:
    app.__dict__.setdefault("ballast", []).append(bytearray(mb * 1_000_000))
    return os.getpid()


@app.job(queue="work")
def who(job: Job) -> int:
    return os.getpid()


@app.job(queue="work", timeout=600)
def mixed(job: Job, path: str | None = None) -> None:
    """Short, unless it has a path to wait for."""
    if path:
        job.event("begun")
        while not Path(path).exists():
            time.sleep(0.01)


@app.job(queue="work")
def steps(job: Job, folder: str) -> str:
    """Goes on to a percentage when the file of that name is there."""
    job.event("begun")
    for pct in (10, 40, 75, 100):
        while not (Path(folder) / str(pct)).exists():
            job.check()
            time.sleep(0.005)
        print(f"reached {pct}", flush=True)
        job.progress(pct, f"step {pct}")
    return "all steps"


@app.job(queue="work", attempts=2)
def retries(job: Job) -> None:
    raise Retry("the other side is away")


@app.job(queue="work")
def cancels(job: Job, why: str = "") -> None:
    raise Cancel(why)


@app.job(queue="work", attempts=1)
def says_cancelled(job: Job) -> None:
    """Nobody has cancelled it."""
    raise Cancelled("as if")


@app.job(queue="work")
def typed(job: Job, at: datetime, place: Path = Path(), every: timedelta | None = None) -> datetime:
    assert isinstance(at, datetime) and isinstance(place, Path) and isinstance(every, timedelta | None)
    return at + (every or timedelta())
