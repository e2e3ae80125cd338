"""Jobs that publish files, and jobs that read them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ostler import Fail, Job, Ostler

app = Ostler()
app.pool("work", workers=2)
app.pool("here", workers=1)


def write(job: Job, text: str) -> Path:
    path = job.scratch / "made"
    path.write_bytes(text.encode())
    return path


@app.job(queue="work", attempts=1)
def publish(job: Job, key: str, text: str = "content") -> str:
    """`{job}` in the key is the job's id."""
    return job.publish(write(job, text), key.replace("{job}", str(job.id))).key


@app.job(queue="work")
def publish_large(job: Job, key: str, megabytes: int) -> str:
    path = job.scratch / "made"
    with path.open("wb") as file:
        for number in range(megabytes):
            file.write(bytes([number % 256]) * 1_000_000)
    return job.publish(path, key).key


@app.job(queue="work")
def publish_many(job: Job, count: int) -> int:
    for number in range(count):
        job.publish(write(job, str(number)), f"{job.id}/{number:04}.txt")
    return count


@app.job(queue="work")
def publish_twice(job: Job, key: str) -> None:
    for text in ("first", "second"):
        job.publish(write(job, text), key)


@app.job(queue="work", attempts=1)
def publish_and_fail(job: Job, key: str) -> None:
    job.publish(write(job, "of a failure"), key)
    raise Fail("NO", "after publishing")


@app.job(queue="work", attempts=2)
def publish_and_die(job: Job, key: str) -> None:
    """The file is there, and nobody was told."""
    if job.crashes == 0:
        job._say = lambda *_: None  # type: ignore[method-assign]
        job.publish(write(job, "of the dead"), key)
        os._exit(9)


@app.job(queue="here", attempts=1)
def publish_here(job: Job, key: str, text: str = "content") -> str:
    return job.publish(write(job, text), key).key


@app.job(queue="here", attempts=1)
def measure(job: Job, key: str) -> dict[str, Any]:
    """What a later job finds."""
    found = job.artifact(key)
    with found.open() as file:
        head = file.read(4).decode()
    path = found.path()
    return {
        "size": found.size,
        "type": found.type,
        "head": head,
        "text": found.read_bytes().decode(errors="replace")[:100],
        "path": str(path),
        "in_path": path.stat().st_size,
        "saved": found.save(job.scratch).name,
    }
