"""What type checkers must accept, with the types that they must find."""

import asyncio
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import IO, Any, assert_type

from ostler import Artifact, BatchId, Chain, Job, JobArtifact, JobFailed, JobId, Ostler, Retry, Snooze, Step
from ostler.testing import Bench

app = Ostler()


@app.job(queue="work", timeout=timedelta(minutes=5), backoff=(1, timedelta(minutes=1)), unique_for=timedelta(hours=1))
def add(job: Job, a: int, b: int = 1) -> int:
    return a + b


@app.job(queue="work")
async def fetch(job: Job, url: str) -> dict[str, Any]:
    raise Retry(after=timedelta(seconds=1)) if url else Snooze(timedelta(seconds=1))


@app.job(queue="work")
def read(job: Job, key: str) -> int:
    found = job.artifact(key)
    assert_type(found, JobArtifact)
    assert_type(found.path(), Path)
    assert_type(found.read_bytes(), bytes)
    assert_type(found.open(), IO[bytes])
    return found.size


@app.job(queue="work")
async def double(job: Job, number: int) -> int:
    return 2 * number


@app.job(queue="work")
def report(job: Job, summary: dict[str, int] | None = None) -> None: ...


@app.job(queue="work")
def next_day(job: Job, day: datetime, files: list[Path] | None = None) -> datetime:
    return day + timedelta(days=1)


assert_type(add.enqueue(a=1), JobId[int])
assert_type(next_day.enqueue(day=datetime.now(timezone.utc), files=[Path("a")]).result(), datetime)
assert_type(add.enqueue(1, 2).result(timeout=3), int)
assert_type(fetch.enqueue(url="x").result(timeout=timedelta(seconds=3)), dict[str, Any])
assert_type(report.enqueue(), JobId[None])
assert_type(add.options(priority=5, delay=timedelta(minutes=1), timeout=2.5).enqueue(a=1), JobId[int])
assert_type(fetch.options(run_at=datetime.now(timezone.utc)).enqueue(url="x"), JobId[dict[str, Any]])
assert_type(add.enqueue_many([{"a": 1}]), list[JobId[int]])
assert_type(fetch.enqueue_many([{"url": ""}]), list[JobId[dict[str, Any]]])
assert_type(fetch.s(url=""), Step[dict[str, Any]])
assert_type(add.s(a=1).then(fetch.s(), into="url"), Chain[dict[str, Any]])
assert_type(fetch.s(url="").then(report.s(), into="summary").then(add.s(b=2), into="a").enqueue(), JobId[int])
assert_type(app.batch([add.s(a=1), add.s(2)], then=report.s(), into="summary"), BatchId[int])
app.batch([add.s(a=1), fetch.s(url="")])
app.cron("nightly", "0 3 * * *", report.s())
assert_type(app.find(7), JobId[Any])
assert_type(add.find(7), JobId[int])
assert_type(fetch.find(7).result(), dict[str, Any])
assert_type(app.jobs(task=fetch, status="failed"), list[JobId[Any]])
assert_type(app.find(7).artifacts(), list[Artifact])
whole: int = add.enqueue(a=1)

for one in app.batch([add.s(a=1)]).results():
    assert_type(one, int)
for other in app.batch([add.s(a=1)]).results(return_exceptions=True):
    assert_type(other, int | JobFailed)


async def main() -> None:
    job = await fetch.enqueue_async(url="x")
    assert_type(await job.result_async(timeout=3), dict[str, Any])
    assert_type(await add.enqueue_async(a=1), JobId[int])
    async for result in app.batch([add.s(a=1)]).results_async():
        assert_type(result, int)


asyncio.run(main())

with Bench(app) as bench:
    job = bench.enqueue(add, a=1)
    assert_type(job, JobId[int])
    assert_type(bench.enqueue(double, number=1).result(), int)
    assert_type(bench.put(add.s(a=1)), JobId[int])
