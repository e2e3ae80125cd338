"""The jobs of nodes that are killed at random. Each run leaves a line with its interval, by a clock that all processes share."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from ostler import Job, Ostler

app = Ostler()
app.queue("narrow", at_once=3)
app.queue("paced", rate="40/s")


def _tell(job: Job, began: float, kind: str) -> None:
    folder = os.environ.get("FLOCK")
    if folder:
        with open(Path(folder) / f"{os.getpid()}", "a") as file:
            file.write(f"{job.id} {job.attempt} {kind} {began:.6f} {time.monotonic():.6f}\n")


@app.job(queue="work")
def hold(job: Job, path: str) -> str:
    """Run until the file exists; leave another one at the end."""
    job.event("begun")
    while not Path(path).exists():
        time.sleep(0.01)
    Path(f"{path}.{job.id}.{job.attempt}").touch()
    return "seen"


@app.job(queue="work")
def plain(job: Job, n: int = 0) -> int:
    time.sleep((n % 8) / 1000)
    return n


@app.job(queue="work")
def told(job: Job, n: int = 0) -> int:
    """Leaves events in its timeline."""
    job.progress(50, "half")
    job.event("half", {"n": n})
    time.sleep(0.05)
    return n


@app.job(queue="work", attempts=4)
def flaky(job: Job, times: int = 1) -> int:
    if job.attempt <= times:
        raise OSError(f"try {job.attempt}")
    return job.attempt


@app.job(queue="work", attempts=1)
def wrong(job: Job) -> None:
    raise ValueError("this one fails")


@app.job(queue="work")
def dies(job: Job, times: int = 1) -> str:
    if job.crashes < times:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


@app.job(queue="narrow")
def narrow(job: Job) -> None:
    began = time.monotonic()
    time.sleep(0.05)
    _tell(job, began, "narrow")


@app.job(queue="paced")
def paced(job: Job) -> None:
    _tell(job, time.monotonic(), "paced")


@app.job(queue="keys", at_once=2, per="user")
def per_user(job: Job, user: str) -> None:
    began = time.monotonic()
    time.sleep(0.02)
    _tell(job, began, f"user-{user}")


@app.job(queue="work", unique=["name"])
def once(job: Job, name: str) -> str:
    time.sleep(0.002)
    return name


@app.job(queue="work")
def add(job: Job, a: int) -> int:
    return a + 1


@app.job(queue="work")
def report(job: Job, summary: dict) -> dict:
    return summary
