"""ostler.testing: a user's own tests of recovery."""

from __future__ import annotations

import asyncio
import json
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fastapi import APIRouter, Request, Response

from ostler import (
    BadArguments,
    Body,
    CallRefused,
    Conflict,
    Fail,
    InputError,
    Job,
    JobFailed,
    JobTimeout,
    ModelFailed,
    NotFound,
    Ostler,
    Snooze,
)
from ostler.testing import Bench, kill_at
from tests import work
from ostler.web.extend import NodeApi
from tests.harness import Node

app = Ostler()


@app.job(queue="clips", attempts=3, backoff=(10, 60))
def cut(job: Job, name: str, fail: int = 0) -> str:
    key = f"{job.id}/{name}"
    if job.published(key):
        return "found"
    (job.scratch / name).write_text("clip")
    job.event("source:ready")
    if job.attempt <= fail:
        raise OSError("storage is away")
    job.progress(50, "cutting")
    job.publish(job.scratch / name, key)
    job.event("published")
    return "cut"


@app.job(queue="clips")
async def later(job: Job) -> str:
    if job.fence == 1:
        raise Snooze(60)
    return "now"


@app.job(queue="clips")
def never(job: Job) -> None:
    raise Fail("VALIDATION", "no")


@app.job(queue="clips", cron="0 * * * *")
def hourly(job: Job) -> None: ...


def test_a_job_runs_inline() -> None:
    with Bench(app) as bench:
        job = bench.enqueue(cut, name="a")
        assert bench.run() == 1
        assert bench.job(job)["result"] == "cut"
        assert bench.events(job) == [
            "created",
            "processing",
            "source:ready",
            "progress",
            "uploaded",
            "published",
            "done",
        ]


def test_a_death_before_the_publish_runs_again_and_after_it_short_circuits() -> None:
    with Bench(app) as bench:
        first, second = bench.enqueue(cut, name="a"), bench.enqueue(cut, name="b")
        with kill_at("source:ready"):
            bench.run()
        assert (bench.job(first)["status"], bench.job(first)["crashes"]) == ("queued", 1)
        with kill_at("published"):
            bench.run()
        bench.advance(10)  # the second crash sends it to the end of its queue for a while
        bench.run()
        assert bench.job(first)["result"] == "found"
        assert bench.job(second)["result"] == "cut"
        assert bench.events(first).count("uploaded") == 1


def test_three_deaths_are_toxic() -> None:
    with Bench(app) as bench:
        job = bench.enqueue(cut, name="a")
        for _ in range(3):
            with kill_at("cutting"):
                bench.run()
            bench.advance(10)
        assert bench.job(job)["error"]["code"] == "TOXIC"


def test_the_clock_is_the_tests_own() -> None:
    with Bench(app) as bench:
        job = bench.enqueue(cut, name="a", fail=1)
        assert bench.run() == 1
        bench.advance(9.9)
        assert bench.run() == 0
        bench.advance(0.2)
        assert bench.run() == 1
        assert bench.job(job)["attempt"] == 2
        snoozed = bench.enqueue(later)
        bench.run()
        assert bench.events(snoozed)[-1] == "snoozed"
        bench.advance(61)
        bench.run()
        assert bench.job(snoozed)["result"] == "now"


def test_what_the_code_under_test_has_enqueued() -> None:
    with Bench(work.app) as bench:
        work.add.enqueue(a=1)  # as the code under test would
        work.add.options(delay=60).enqueue(a=2)
        bench.enqueue(work.fails)
        assert bench.enqueued(work.add) == [{"a": 1}, {"a": 2}]
        assert len(bench.enqueued()) == 3
        bench.run()
        assert bench.enqueued(work.add) == [{"a": 2}]
        bench.advance(61)  # its delay counts by the bench's clock
        bench.run()
        assert bench.enqueued(work.add) == []


def test_a_unique_job_that_was_there_already_is_told() -> None:
    with Bench(work.app):
        first = work.add.options(unique_key="k").enqueue(a=1)
        again = work.add.options(unique_key="k").enqueue(a=2)
        many = work.add.options(unique_key="k").enqueue_many([{"a": 3}])
        assert (first.is_new, again.is_new, again, many[0].is_new) == (True, False, first, False)
        assert work.add.enqueue(a=1).is_new


def test_failures_and_schedules() -> None:
    with Bench(app) as bench:
        job = bench.enqueue(never)
        bench.run()
        assert bench.job(job)["error"]["code"] == "VALIDATION"
        bench.advance(3600)
        assert bench.run() == 1


def test_the_bench_leaves_nothing_behind(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OSTLER_DATA", str(tmp_path))
    with Bench(app) as bench:
        bench.enqueue(cut, name="a")
        bench.run()
    import os

    assert os.environ["OSTLER_DATA"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_bench_is_as_strict_as_a_node() -> None:
    strict = Ostler()
    strict.queue("slow", rate="1/h")

    @strict.job(queue="work", attempts=2)
    def odd(job: Job, x: int = 0) -> object:
        return {1, 2} if x == 0 else x

    @strict.job(queue="slow")
    def slow(job: Job) -> None: ...

    with Bench(strict) as bench:
        bad = bench.enqueue(odd)
        chained = bench.put(odd.s(x=1))
        late = bench.put(odd.options(delay=60).s(x=2))
        for _ in range(3):
            bench.enqueue(slow)
        bench.run()
        assert bench.job(bad)["error"]["code"] == "BAD_RESULT"
        assert bench.job(chained)["result"] == 1
        assert bench.job(late)["status"] == "queued"
        assert [j["status"] for j in bench.store.jobs.list(task="slow")[0]].count("done") == 1
        bench.advance(61)
        bench.run()
        assert bench.job(late)["result"] == 2


RUNS: list[tuple[str, dict[str, object]]] = [
    ("add", {"a": 1, "b": 2}),
    ("add_async", {"a": 1, "b": 2}),
    ("fails", {}),
    ("gives_up", {}),
    ("asks_again", {}),
    ("exits", {}),
    ("retries", {}),
    ("cancels", {"why": "nobody wants it"}),
    ("cancels", {}),
    ("says_cancelled", {}),
    ("typed", {"at": "2026-01-31T12:00:00Z", "place": "a.txt", "every": 1.5}),
    ("returns", {"what": "set"}),
    ("returns", {"what": "big"}),
    ("returns", {"what": "deep"}),
]


def test_the_bench_and_a_node_tell_the_same_of_every_run(node: Node) -> None:
    """Results, codes, messages and tracebacks."""
    fields = ("status", "result", "error", "attempt", "crashes", "last_error")
    stored = [node.enqueue(task, **args) for task, args in RUNS]
    with Bench(work.app) as bench:
        mine = [bench.put(work.app.tasks[task].s(**args)) for task, args in RUNS]
        for _ in range(5):
            bench.run()
            bench.advance(1000)
        for (task, args), here, there in zip(RUNS, mine, stored, strict=True):
            found, wanted = bench.job(here), node.wait_job(there)
            assert {f: found[f] for f in fields} == {f: wanted[f] for f in fields}, (task, args)
            assert [*map(_timeless, found["errors"])] == [*map(_timeless, wanted["errors"])], (task, args)
        assert bench.job(mine[7])["error"] == {"code": "CANCELLED", "message": "nobody wants it"}


def _timeless(error: dict) -> dict:
    """What does not depend on where and when it ran."""
    return {name: value for name, value in error.items() if name not in ("at", "node", "worker", "duration_ms")}


def test_models_answer_in_the_tests_own_process_unless_the_test_answers() -> None:
    app = Ostler()

    @app.model("shout")
    class Shout:
        def load(self, model_id: str) -> None:
            self.mark = "!"

        async def infer(self, payload: dict) -> str:
            return payload["text"].upper() + self.mark

    @app.model("letters")
    class Letters:
        def load(self, model_id: str) -> None: ...

        def infer(self, payload: str) -> Iterator[str]:
            yield from payload

    app.server("llm", ["llama-server", "--port", "{port}"], ready="tcp:")

    @app.job(queue="q", attempts=2)
    def says(job: Job, text: str) -> list[Any]:
        return [app.call_sync("shout", None, {"text": text}), app.call_sync("letters", None, text)]

    @app.job(queue="q", attempts=1)
    async def asks(job: Job) -> Any:
        return [item async for item in app.stream("letters", None, "ab")] + [await app.call("llm", None, 1)]

    with Bench(app) as bench:
        job, asking = bench.enqueue(says, text="ab"), bench.enqueue(asks)
        bench.run()
        assert job.result() == ["AB!", ["a", "b"]]
        with pytest.raises(JobFailed, match=r"no program is started here for 'llm'; answer its calls with bench.model"):
            asking.result()
        bench.model("llm", lambda payload: payload + 1)
        again = bench.enqueue(asks)
        bench.run()
        assert again.result() == ["a", "b", 2]


@pytest.mark.parametrize("fake", [False, True])
def test_payloads_results_and_errors_of_models_arrive_as_on_a_node(fake: bool) -> None:
    app = Ostler()

    class Looks:
        def load(self, model_id: str) -> None: ...

        def infer(self, payload: Any) -> Any:
            if payload == "no":
                raise InputError("that is no picture")
            if payload == "bug":
                raise ZeroDivisionError
            return payload.data[::-1] if isinstance(payload, Body) else {1: (payload, payload)}

    app.model("looks")(Looks)

    @app.model("each", batch=4)
    class Each:
        def load(self, model_id: str) -> None: ...

        def infer_batch(self, payloads: list[int]) -> list[int]:
            return [payload + 1 for payload in payloads]

    def ask(payload: Any, model: str = "looks") -> Any:
        return app.call_sync(model, None, payload)

    with Bench(app) as bench:
        if fake:
            bench.model("looks", Looks().infer)
        for sent in (b"abc", Body(b"abc", "image/png"), Body(b"abc", "image/png", fields={"a": "b"})):
            found = ask(sent)
            assert isinstance(found, Body) and found.data == b"cba"
        assert ask(1) == {"1": [1, 1]}
        assert [*app.stream_sync("looks", None, 1)] == [{"1": [1, 1]}]
        assert ask(1, "each") == 2
        with pytest.raises(CallRefused, match="that is no picture"):
            ask("no")
        with pytest.raises(ModelFailed, match="ZeroDivisionError"):
            asyncio.run(app.call("looks", None, "bug"))
        with pytest.raises(CallRefused, match="did you mean 'looks'"):
            ask(1, "look")
        with pytest.raises(BadArguments, match="is not JSON"):
            ask({"picture": b"abc"})


def test_the_apps_own_routes_answer_as_on_a_node() -> None:
    app = Ostler()

    @app.job(queue="a")
    def double(job: Job, n: int) -> int:
        (job.scratch / "n.txt").write_text(str(n))
        job.publish(job.scratch / "n.txt", f"{job.id}.txt")
        return 2 * n

    app.model("echo")(type("Echo", (), {"load": lambda _, model_id: None, "infer": lambda _, payload: payload}))

    @app.web
    def routes(node: NodeApi) -> APIRouter:
        router = APIRouter()
        assert node.settings.data_dir == app.settings().data_dir

        @router.post("/double")
        async def waits(n: str) -> dict[str, Any]:
            stored = await node.enqueue("double", {"n": json.loads(n)})
            waited = await (await double.enqueue_async(n=4)).result_async(timeout=60)
            return {"result": waited, "status": (await node.job(stored["id"]))["status"]}

        @router.delete("/jobs/{job}")
        async def cancel(job: int) -> Any:
            return (await node.cancel(job))["status"]

        @router.get("/files/{key}")
        async def file(request: Request, key: str) -> Response:
            return await node.artifact(request, key)

        @router.get("/echo")
        async def echo(text: str) -> Any:
            listed = await node.jobs(task="double", status="cancelled")
            return [(await node.call("echo", None, text)).result, *node.models(), len(listed)]

        return router

    with Bench(app) as bench:
        client = bench.client()
        later = client.post("/double?n=4").json()
        assert later == {"result": 8, "status": "done"}
        assert "'n' must be int" in client.post("/double?n=null").json()["error"]["message"]
        assert client.get("/files/2.txt").text == "4"
        assert client.get("/files/3.txt").status_code == 404
        assert client.delete(f"/jobs/{double.enqueue(n=1)}").json() == "cancelled"
        assert client.delete("/jobs/1").status_code == 409
        assert client.get("/echo?text=hi").json() == ["hi", "echo:echo", 1]


def test_waiting_runs_the_job_and_never_waits_in_real_time() -> None:
    app = Ostler()
    app.queue("rare", rate="1/h")
    ran: list[int] = []

    @app.job(queue="b")
    async def double(job: Job, n: int) -> int:
        ran.append(n)
        await asyncio.sleep(0)
        return 2 * n

    @app.job(queue="a")
    def other(job: Job) -> None: ...

    @app.job(queue="rare")
    def rare(job: Job) -> int:
        return 1

    @app.job(queue="b", attempts=1)
    async def asks(job: Job, timeout: float | None = 60) -> list[int]:
        """Waits for other jobs, blocking and not."""
        first = double.enqueue(n=10).result(timeout=timeout)
        both = [await double.enqueue_async(n=n) for n in (11, 12)]
        job.event("asked")
        return [first, *await asyncio.gather(*(one.result_async(timeout=timeout) for one in both))]

    async def in_a_loop() -> list[int]:
        both = [await double.enqueue_async(n=n) for n in (2, 3)]
        return [*await asyncio.gather(*(job.result_async(timeout=60) for job in both)), double.enqueue(n=4).result()]

    with Bench(app) as bench:
        bench.enqueue(other)
        assert double.enqueue(n=1).result(timeout=60) == 2
        assert asyncio.run(in_a_loop()) == [4, 6, 8]
        assert asks.enqueue().result() == [20, 22, 24]
        assert double.s(n=1).then(double.s(), into="n").enqueue().result(timeout=60) == 4
        assert [*app.batch([double.s(n=n) for n in (1, 2)]).results(timeout=60)] == [2, 4]
        assert bench.enqueued(other) == [{}], "jobs of other queues are left alone"
        with pytest.raises(JobFailed, match="without a timeout"):
            asks.enqueue(timeout=None).result()
        bench.run()
        ran.clear()

        waiting = double.enqueue(n=5)
        with pytest.raises(JobTimeout):
            waiting.result(timeout=0)
        assert ran == [], "without time nothing runs"
        late = double.options(delay=90).enqueue(n=6)
        with pytest.raises(JobTimeout, match=r"scheduled to run in 90 s; call bench\.advance\(90\) first"):
            late.result(timeout=10**6)
        with pytest.raises(JobTimeout, match=r"job \d+ \(double\) is queued: .*call bench\.advance\(90\) first"):
            asyncio.run(late.result_async())
        bench.advance(timedelta(seconds=90))
        assert late.result() == 12

        assert rare.enqueue().result() == 1
        with pytest.raises(
            JobTimeout, match=r"the rate of queue rare is reached; .*; call bench\.advance\(3601\) first"
        ):
            rare.enqueue().result()
        dying = asks.enqueue()
        with kill_at("asked"), pytest.raises(JobTimeout, match=r"after .*SIGKILL.*: call bench\.run\(\) to go on"):
            dying.result()
        assert dying.result() == [20, 22, 24]


def test_waiting_for_a_job_that_will_be_retried_says_why() -> None:
    for timeout in (None, 100):
        with Bench(work.app) as bench:
            job = bench.enqueue(work.fails, times=1)
            with pytest.raises(
                JobTimeout, match=r"is queued after OSError: try 1 failed.*: it is scheduled .*; call bench.advance"
            ) as found:
                job.result(timeout)
            assert "within" not in str(found.value) and "in fails" in found.value.__notes__[0]


def test_a_failure_is_shown_once_and_at_the_line_that_waited() -> None:
    with Bench(work.app), pytest.raises(JobFailed) as found:
        work.exits.enqueue().result()
    shown = [entry for entry in found.traceback if not entry.ishidden(found)]
    assert [Path(entry.path).name for entry in shown] == ["test_bench.py"]
    assert repr(found.value) == f"JobFailed({str(found.value)!r})" and "Traceback" not in repr(found.value)
    assert "".join(traceback.format_exception(found.value)).count("in exits") == 1


def test_jobs_are_found_listed_and_retried_from_python() -> None:
    with Bench(app) as bench:
        failed, done = never.enqueue(), cut.enqueue(name="a")
        bench.run()
        assert app.jobs() == [done, failed]
        assert app.jobs(limit=1) == [done] and app.jobs(before=done) == [failed]
        assert app.jobs(task=never, status="failed", queue="clips") == app.jobs(task="never") == [failed]
        assert app.jobs(status="queued") == app.jobs(queue="other") == []
        assert cut.find(done).result() == "cut"
        with pytest.raises(NotFound, match=r"job 1 is of task 'never', not of 'cut'"):
            cut.find(failed)
        failed.retry()
        assert (failed.status(), bench.run(), failed.status()) == ("queued", 1, "failed")
        waiting = cut.enqueue(name="b")
        with pytest.raises(Conflict):
            waiting.retry()
        for wrong in ({"status": "waiting"}, {"limit": 0}, {"limit": 1001}):
            with pytest.raises(BadArguments, match=r"must be"):
                app.jobs(**wrong)


def test_the_callback_of_a_batch_and_cancelling_one() -> None:
    with Bench(work.app) as bench:
        batch = work.app.batch([work.add.s(a=1), work.add.s(a=2)], then=work.add.s(a=40))
        chain = bench.put(work.add.s(a=1).then(work.add.s(b=5), into="a"))
        bench.run()
        assert chain.result() == 7
        assert [*batch.results()] == [2, 3]
        assert batch.callback(timeout=5).result() == 41
        waiting = work.app.batch([work.add.s(a=1), work.add.s(a=2)])
        assert waiting.cancel() == 2
        assert waiting.cancel() == 0
        assert waiting.info()["pending"] == 0
        with pytest.raises(NotFound, match="has no callback"):
            waiting.callback(timeout=1)


def test_a_bench_inside_another_leaves_it_as_it_was() -> None:
    app = Ostler()

    @app.job()
    def double(job: Job, n: int) -> int:
        return 2 * n

    with Bench(app) as outer:
        waiting = double.enqueue(n=1)
        with Bench(app, now=5.0):
            assert double.enqueue(n=2).result() == 4
        assert waiting.result() == 2
        assert double.enqueue(n=3).info()["created_at"] == outer.now * 1000
