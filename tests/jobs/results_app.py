"""Jobs whose results tests wait for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from ostler import Cancel, Fail, Job, JobFailed, Ostler


class Look(BaseModel):
    columns: int


app = Ostler()
app.pool("work", workers=2)
app.pool("nobody", workers=0)


@app.job(queue="work")
def add(job: Job, a: int, b: int) -> int:
    return a + b


@app.job(queue="work")
def sheet(job: Job, look: Look) -> int:
    return look.columns


@app.job(queue="work")
async def double(job: Job, number: int) -> int:
    return 2 * number


@app.job(queue="work", attempts=1)
def divide(job: Job, a: int, b: int) -> float:
    return a / b


@app.job(queue="work")
def refuse(job: Job) -> None:
    raise Fail("NO", "never")


@app.job(queue="work")
def drop(job: Job) -> None:
    raise Cancel("not wanted")


@app.job(queue="work")
def until_there(job: Job, path: str) -> str:
    job.event("begun", {"path": path})
    job.progress(25, "waiting")
    while not Path(path).exists():
        job.check()
        time.sleep(0.01)
    return "there"


@app.job(queue="nobody")
def never(job: Job) -> None: ...


@app.job(queue="work", attempts=1)
def asks(job: Job, timeout: float | None = None, of: int | None = None) -> Any:
    """Waits for another job."""
    other = app.find(of) if of else never.enqueue()
    return other.result(timeout=timeout)


@app.job(queue="work")
def collect(job: Job, summary: dict[str, Any]) -> list[Any]:
    found = app.find_batch(summary["batch"]).results(return_exceptions=True)
    return [one.code if isinstance(one, JobFailed) else one for one in found]
