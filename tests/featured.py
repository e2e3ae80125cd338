"""Jobs with limits, chains, artifacts: what tests/jobs/test_features.py runs on real workers."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from ostler import Job, Ostler, Snooze

app = Ostler()
app.queue("narrow", at_once=2)
app.queue("slow", rate="5/s")


@app.job(queue="narrow")
def hold(job: Job, folder: str) -> int:
    """Leave a file while it runs; the most there ever were."""
    mine = Path(folder) / str(job.id)
    mine.touch()
    time.sleep(0.05)
    most = len(list(Path(folder).iterdir()))
    mine.unlink()
    return most


@app.job(queue="keys", at_once=1, per="user")
def per_user(job: Job, user: str, folder: str) -> int:
    mine = Path(folder) / f"{user}-{job.id}"
    mine.touch()
    time.sleep(0.05)
    most = len(list(Path(folder).glob(f"{user}-*")))
    mine.unlink()
    return most


@app.job(queue="slow")
def begin(job: Job) -> float:
    return time.time()


@app.job(queue="work", unique=["name"])
def once(job: Job, name: str, other: int = 0) -> str:
    return name


@app.job(queue="work")
def double(job: Job, x: int) -> int:
    return 2 * x


@app.job(queue="work")
def report(job: Job, summary: dict) -> dict:
    return summary


@app.job(queue="work", attempts=1)
def fails(job: Job) -> None:
    raise OSError("no")


@app.job(queue="work")
def snoozes(job: Job) -> int:
    if job.fence < 3:
        raise Snooze(0.01)
    return job.attempt


@app.job(queue="work", attempts=1)
def scratches(job: Job, fail: bool = False) -> str:
    (job.scratch / "big").write_bytes(b"x" * 1000)
    if fail:
        raise OSError("kept for a look")
    return str(job.scratch)


@app.job(queue="work")
def publishes(job: Job, wait: str | None = None, die: bool = False) -> str:
    key = f"{job.id}/out.txt"
    if job.published(key, check=lambda path: None if path.read_text() == "content" else 1 / 0):
        return "found"
    (job.scratch / "out.txt").write_text("content")
    job.event("begun")
    while wait and not Path(wait).exists():
        time.sleep(0.01)
    job.publish(job.scratch / "out.txt", key)
    if die:
        os._exit(9)
    return "made"


@app.job(queue="work")
def talks(job: Job, text: str) -> None:
    print("python says", text)
    subprocess.run([sys.executable, "-c", f"print('a child says {text}')"], check=True)
    print("to stderr", file=sys.stderr)


@app.job(queue="work", cron="0 0 1 1 *", zone="Europe/Berlin")
def new_year(job: Job) -> str:
    return "happy"


@app.job(queue="work", attempts=1)
def digs(job: Job, levels: int, fail: bool = False) -> int:
    """Makes its scratch so deep that no path reaches the bottom."""
    descriptor = os.open(job.scratch, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("deeper", dir_fd=descriptor)
        below = os.open("deeper", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    if fail:
        raise OSError("too deep")
    return os.getpid()
