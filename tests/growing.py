"""Jobs of every kind, for tests of a store that moves from SQLite to PostgreSQL."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ostler import Job, Ostler

app = Ostler()
app.queue("slow", rate="1000/s")


@app.job(queue="work")
def carry(job: Job, text: str, more: int = 0) -> int:
    return len(text) + more


@app.job(queue="slow")
def add(job: Job, x: int, y: int = 1) -> int:
    return x + y


@app.job(queue="work", attempts=1)
def fails(job: Job) -> None:
    raise OSError("no")


@app.job(queue="work", backoff=(3600, 3600))
def again(job: Job) -> int:
    if job.attempt == 1:
        raise OSError("not yet")
    return job.attempt


@app.job(queue="work", unique=True, unique_for=3600)
def once(job: Job, name: str) -> str:
    return name


@app.job(queue="held", unique=["name"])
def wait(job: Job, path: str, name: str = "") -> int:
    job.event("begun", {"attempt": job.attempt})
    while not Path(path).exists():
        time.sleep(0.01)
    return job.attempt


@app.job(queue="held", at_once=1, per="user")
def per_user(job: Job, user: str) -> str:
    return user


@app.job(queue="work")
def dies(job: Job) -> str:
    if job.attempt == 1:
        os._exit(7)
    return "survived"


@app.job(queue="work")
def report(job: Job, summary: dict) -> dict:
    return summary


@app.job(queue="work", cron="0 0 1 1 *")
def new_year(job: Job) -> str:
    return "happy"
