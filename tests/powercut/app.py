"""What runs while the writes are recorded: the clip service (for its uploads) and jobs that publish, in chains and batches."""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

from ostler import Job, Retry
from ostler.apps.clips import app

__all__ = ["app"]


def acknowledge(kind: str, **facts: Any) -> None:
    """Record, in the same order as all writes, that somebody was told of a success (or, for `asked` and `publishing`, that it has begun)."""
    if path := os.environ.get("POWERCUT_ACKS"):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, json.dumps({"kind": kind, **facts}).encode() + b"\n")
        finally:
            os.close(file)


def _publish(job: Job, text: str) -> None:
    path = job.scratch / "out.txt"
    path.write_text(text)
    acknowledge("publishing", key=f"{job.id}/out.txt")
    published = job.publish(path, f"{job.id}/out.txt")
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    acknowledge("artifact", key=published.key, job=job.id, sha256=sha256, fence=job.fence)


@app.job(queue="work")
def plain(job: Job, token: str) -> str:
    return token


@app.job(queue="work")
def link(job: Job, token: str, n: int, of: int) -> str:
    """One step of a chain. It publishes its token unless an earlier run has, and returns what is published."""
    if job.published(f"{job.id}/out.txt") is None:
        _publish(job, token * 50)
    with job.results.open(f"{job.id}/out.txt") as file:
        return file.read().decode()[: len(token)]


@app.job(queue="work", attempts=8)
def again(job: Job, token: str, runs: int) -> str:
    """Publishes in each of its runs."""
    _publish(job, f"{token} {job.attempt}")
    if job.attempt < runs:
        raise Retry("once more", after=0.001)
    return token


@app.job(queue="work")
def summary(job: Job, token: str, result: dict[str, Any]) -> str:
    return token


@app.job(queue="held")
def held(job: Job, token: str) -> str:
    return token
