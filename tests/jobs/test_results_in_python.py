"""What storing a job returns: an int that waits for the job's result, pushed by the node or read from the store."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import pickle
import sqlite3
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from ostler import BadArguments, ConfigError, Conflict, JobCancelled, JobFailed, JobId, JobTimeout, NotFound, Ostler
from ostler.cli import cli
from ostler.jobs import awaiting
from ostler.store import Store
from ostler.store.flows import step_of
from ostler.store.nodes import NodeRow
from ostler.store.rows import Turn
from ostler.testing import Bench
from tests.harness import Node, until
from tests.jobs.test_flows import end
from tests.jobs.test_flows import job as row
from tests.stores import store_of, value

APP = Path(__file__).parent / "results_app.py"


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def node(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    with store_of(request) as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OSTLER_STORE", url)
        folder = tmp_path_factory.mktemp("results")
        made = Node(folder, APP, OSTLER_POLL_INTERVAL="30").start()  # nothing is found by the poll
        yield made
        made.kill()


@pytest.fixture(scope="module")
def jobs(node: Node):
    """The app's module, as a program beside the node has it."""
    found = fresh(node.folder)
    yield found
    found.app.producer.close()


def fresh(data: Path) -> ModuleType:
    """The app's module with an app of its own."""
    spec = importlib.util.spec_from_file_location("results_app", APP)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    found.app.data = str(data)
    return found


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same where no node runs."""
    monkeypatch.setenv("OSTLER_STORE", "sqlite")
    found = fresh(tmp_path / "alone")
    yield found
    found.app.producer.close()


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Whoever would poll the store fails."""

    def sleeps(*_: Any) -> None:
        raise AssertionError("it polls")

    monkeypatch.setattr(awaiting._Blocking, "sleep", sleeps)
    monkeypatch.setattr(awaiting._Looped, "sleep", sleeps)


def test_the_handle_is_the_id(jobs) -> None:
    job = jobs.add.enqueue(a=1, b=2)
    assert isinstance(job, int) and job == int(job) == job.id and json.loads(json.dumps([job])) == [int(job)]
    assert f"{job}" == str(int(job)) and {int(job): "x"}[job] == "x"
    assert job.result() == 3
    copied = pickle.loads(pickle.dumps(job))
    assert copied == job
    with pytest.raises(ConfigError, match=rf"app.find\({job}\)"):
        copied.result()
    assert jobs.app.find(copied).result() == 3


def test_results_are_pushed_by_the_node(jobs, pushed, tmp_path: Path) -> None:
    """The node's poll comes every 30 s and ours fails: what wakes the waiter is the turn that writes the end."""
    job = jobs.until_there.enqueue(path=str(tmp_path / "file"))
    threading.Timer(0.1, (tmp_path / "file").touch).start()
    began = time.monotonic()
    assert job.result(timeout=60) == "there"
    assert time.monotonic() - began < 20


def test_many_wait_at_once_on_an_event_loop(jobs, pushed) -> None:
    async def main() -> list[int]:
        stored = await jobs.double.enqueue_many_async({"number": n} for n in range(50))
        return await asyncio.gather(*(job.result_async(timeout=60) for job in stored))

    assert asyncio.run(main()) == [2 * n for n in range(50)]


def test_a_failed_job_raises_with_its_code_message_and_traceback(jobs) -> None:
    job = jobs.divide.enqueue(a=1, b=0)
    with pytest.raises(JobFailed) as failed:
        job.result(timeout=60)
    error = failed.value
    assert (error.code, error.job, error.task) == ("RETRIES_EXHAUSTED", job, "divide")
    assert "ZeroDivisionError" in error.message and "return a / b" in error.traceback
    shown = "".join(traceback.format_exception(error))
    assert f"JobFailed: job {job} (divide) failed with RETRIES_EXHAUSTED: ZeroDivisionError" in shown
    assert "In the worker:\nTraceback (most recent call last):" in shown and "return a / b" in shown
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.traceback == error.traceback
    with pytest.raises(JobFailed, match="failed with NO: never"):
        jobs.refuse.enqueue().result(timeout=60)


def test_a_cancelled_job_raises_that(jobs, tmp_path: Path) -> None:
    with pytest.raises(JobCancelled, match="was cancelled: not wanted"):
        jobs.drop.enqueue().result(timeout=60)
    running = jobs.until_there.enqueue(path=str(tmp_path / "never"))
    until(lambda: running.status() == "processing", "the job to run")
    running.cancel()
    with pytest.raises(JobCancelled) as cancelled:
        running.result(timeout=60)
    assert cancelled.value.code == "CANCELLED" and isinstance(cancelled.value, JobFailed)
    with pytest.raises(Conflict):
        running.cancel()


def test_a_timeout_says_the_state_that_was_found(jobs, tmp_path: Path) -> None:
    waiting = jobs.never.enqueue()
    with pytest.raises(JobTimeout, match=r"has not ended within 0.05 s: it is queued; .*nobody") as late:
        waiting.result(timeout=timedelta(milliseconds=50))
    assert late.value.state == "queued" and isinstance(late.value, TimeoutError)
    with pytest.raises(JobTimeout, match="within 0 s"):
        waiting.result(timeout=0)
    waiting.cancel()
    assert waiting.status() == "cancelled"
    running = jobs.until_there.enqueue(path=str(tmp_path / "file"))
    until(lambda: running.progress() == 25, "the job to report")
    with pytest.raises(JobTimeout, match="it is processing, at 25 %, waiting"):
        asyncio.run(running.result_async(timeout=0.05))
    (tmp_path / "file").touch()
    assert running.result(timeout=60) == "there"
    for wrong in (-1, "soon", True, float("nan")):
        with pytest.raises(BadArguments, match="timeout must be"):
            running.result(timeout=wrong)


def test_a_job_can_be_found_and_read(jobs) -> None:
    job = jobs.app.find(int(jobs.add.enqueue(a=2, b=2)))
    assert job.result(timeout=60) == 4
    assert (job.status(), job.progress(), job.info()["args"]) == ("done", None, {"a": 2, "b": 2})
    assert [event["name"] for event in job.events()] == ["created", "processing", "done"]
    with pytest.raises(NotFound, match="there is no job 99999999"):
        jobs.app.find(99_999_999)
    with pytest.raises(NotFound, match="there is no batch 99999999"):
        jobs.app.find_batch(99_999_999)


def test_the_result_of_a_chain_is_that_of_its_last_step(jobs) -> None:
    chain = jobs.add.s(a=1, b=2).then(jobs.double.s(), into="number").then(jobs.double.s(), into="number").enqueue()
    assert chain.result(timeout=60) == 12
    assert chain.info()["task"] == "double" and chain.info()["id"] > chain
    assert jobs.app.find(chain).result(timeout=60) == 3
    broken = jobs.refuse.s().then(jobs.double.s(), into="number").enqueue()
    with pytest.raises(JobFailed, match=rf"job {broken} \(refuse\)"):
        asyncio.run(broken.result_async(timeout=60))


def test_a_batch_gives_the_results_of_its_jobs_one_by_one_also_to_its_callback(jobs) -> None:
    parts = [jobs.add.s(a=1, b=1), jobs.divide.s(a=1, b=0), jobs.add.s(a=2, b=2).then(jobs.double.s(), into="number")]
    batch = jobs.app.batch(parts, then=jobs.collect.s(), into="summary")
    found = [*batch.results(timeout=60, return_exceptions=True)]
    assert [found[0], found[2]] == [2, 8] and isinstance(found[1], JobFailed)
    with pytest.raises(JobFailed):
        [*batch.results(timeout=60)]
    callback = until(lambda: batch.info()["callback_job"], "the callback to be stored")
    assert jobs.app.find(callback).result(timeout=60) == [2, "RETRIES_EXHAUSTED", 8]
    assert jobs.app.find_batch(int(batch)).jobs == batch.jobs

    async def main() -> list[Any]:
        return [one async for one in jobs.app.find_batch(batch).results_async(60, return_exceptions=True)]

    assert [str(one) for one in asyncio.run(main())] == [str(one) for one in found]


def test_what_pydantic_refuses_is_not_stored_over_http_and_from_the_shell(node: Node) -> None:
    before = node.get("/api/v1/jobs")[1]["jobs"][:1]
    status, answer = node.post("/api/v1/jobs", {"task": "sheet", "args": {"look": {"columns": "many"}}})
    assert (status, answer["error"]["code"]) == (422, "BAD_ARGUMENTS")
    assert "'look.columns': Input should be a valid integer" in answer["error"]["message"]
    if os.environ["OSTLER_STORE"] != "sqlite":  # the shell does not know which of several nodes has the class
        return
    told = CliRunner().invoke(cli, ["enqueue", "sheet", 'look={"columns": "many"}', "--data", str(node.folder)])
    assert "'look.columns': Input should be a valid integer" in str(told.exception)
    assert node.get("/api/v1/jobs")[1]["jobs"][:1] == before
    stored = CliRunner().invoke(
        cli, ["enqueue", "sheet", 'look={"columns": "3"}', "--data", str(node.folder), "--json"]
    )
    assert node.wait_job(json.loads(stored.output)["id"])["result"] == 3


def test_waiting_inside_a_job_needs_a_timeout(jobs) -> None:
    """Always, not only if the other job has not ended yet; and it is an exception like any other, with a traceback."""
    ended = jobs.add.enqueue(a=1, b=1)
    ended.result(timeout=60)
    for of in (None, int(ended)):
        with pytest.raises(JobFailed, match=r"job \d+ waits for job \d+ without a timeout: .*a chain") as hangs:
            jobs.asks.enqueue(of=of).result(timeout=60)
        assert hangs.value.code == "RETRIES_EXHAUSTED"
        assert "results_app.py" in hangs.value.traceback
    with pytest.raises(JobFailed, match="JobTimeout: job .* has not ended within 0.1 s"):
        jobs.asks.enqueue(timeout=0.1).result(timeout=60)
    assert jobs.asks.enqueue(of=int(ended), timeout=0).result(timeout=60) == 2


def test_a_job_of_a_transaction_that_is_not_committed_is_not_waited_for(jobs, node: Node) -> None:
    url = os.environ["OSTLER_STORE"]
    is_file = url == "sqlite"
    connection: Any = (
        sqlite3.connect(node.folder / "ostler.db", isolation_level=None) if is_file else psycopg.connect(url)
    )
    with connection:
        connection.execute("BEGIN IMMEDIATE" if is_file else "SELECT 1")
        job = jobs.add.enqueue(a=1, b=1, connection=connection)
        with pytest.raises(NotFound, match="connection=…, and that transaction has not been committed"):
            job.result()
        connection.commit()
    connection.close()
    jobs.app.wake()
    assert job.result(timeout=60) == 2


def test_a_route_of_the_node_cannot_stop_the_node_by_waiting(alone) -> None:
    """Its event loop would wait for an answer that it has to give itself."""
    job = alone.add.enqueue(a=1, b=1)
    (Path(alone.app.data) / "node.json").write_text(json.dumps({"pid": os.getpid(), "url": "http://127.0.0.1:1"}))

    async def route() -> None:
        job.result(timeout=60)

    with pytest.raises(BadArguments, match="would block the node: use await"):
        asyncio.run(route())
    finish(alone.app.producer.store(), job)
    asyncio.run(route())  # there is nothing to wait for


# ---- over HTTP


def test_anybody_can_wait_over_http(jobs, node: Node, tmp_path: Path) -> None:
    job = jobs.until_there.enqueue(path=str(tmp_path / "file"))
    status, view = node.get(f"/api/v1/jobs/{job}?wait=0.05")
    assert status == 200 and view["status"] in ("queued", "processing")
    threading.Timer(0.1, (tmp_path / "file").touch).start()
    status, view = node.get(f"/api/v1/jobs/{job}?wait=60")
    assert (status, view["status"], view["result"]) == (200, "done", "there")
    assert node.get(f"/api/v1/jobs/{job}?wait=60")[1]["status"] == "done"  # at once
    assert [node.get(f"/api/v1/jobs/{job}?wait={wait}")[0] for wait in ("-1", "61", "x", "nan")] == [422] * 4
    assert node.get("/api/v1/jobs/99999999?wait=5")[0] == 404


# ---- without a node


def finish(store: Store, job: int) -> None:
    """As a node would."""
    if not store.nodes.all():
        store.nodes.register(NodeRow("n", "n", lease_ms=10**12))
    (claim,) = store.turns.take(Turn("n", store.now(), wants={"work": ["w"]})).claims
    assert claim.id == job
    end(store, claim, result="42", now=store.now())


def test_without_a_node_the_store_is_polled_less_and_less_often(alone, monkeypatch: pytest.MonkeyPatch) -> None:
    job, pauses = alone.add.enqueue(a=1, b=1), []

    async def sleeps(_: Any, bell: Any, seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 12:
            finish(alone.app.producer.store(), job)

    monkeypatch.setattr(awaiting._Blocking, "sleep", sleeps)
    assert job.result(timeout=3600) == 42
    assert pauses[0] == 0.05 and pauses[-1] == 1.0 and sorted(pauses) == pauses
    with pytest.raises(JobTimeout, match=r"it is queued; no node is running in /.*; start one with 'ostler up'"):
        alone.add.enqueue(a=1, b=1).result(timeout=0)


def test_a_node_that_does_not_answer_is_done_without(alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has just died, or refuses: then the store is read."""
    monkeypatch.setattr(awaiting, "node_url", lambda _: "http://127.0.0.1:1")
    job = alone.add.enqueue(a=1, b=1)
    thread = threading.Timer(0.1, lambda: _finish_elsewhere(alone.app, job))
    thread.start()
    assert job.result(timeout=60) == 42
    thread.join()


def _finish_elsewhere(app: Ostler, job: JobId[Any]) -> None:
    finish(app.producer.store(), job)
    app.producer.close()


def test_both_databases_tell_ended_jobs_newest_steps_and_jobs_of_batches(store: Store) -> None:
    first, second = store.jobs.enqueue([row(), row()], 1)
    assert store.jobs.ended([first, second, 10**9]) == {10**9}
    store.jobs.cancel(first, 2)
    assert store.jobs.ended([first, second]) == {first}
    assert store.jobs.newest_step(second) == second
    chain = json.dumps([step_of(row(queue="work"), "x")])
    batch, (alone, begins) = store.jobs.flows.batch([row(queue="work"), row(queue="work", next=chain)], None, 3)
    finish(store, alone)
    finish(store, begins)
    newest = store.jobs.newest_step(begins)
    assert newest > begins and store.jobs.find(newest)["args"] == {"x": 42}
    assert store.jobs.of_batch(batch, 0, 10) == [(alone, False), (begins, True)]
    assert store.jobs.of_batch(batch, alone, 10) == [(begins, True)] == store.jobs.of_batch(batch, alone, 1)


# ---- on PostgreSQL


@pytest.fixture
def shared(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A program without a node in its data directory, on PostgreSQL."""
    monkeypatch.setenv("OSTLER_STORE", database)
    found = fresh(tmp_path / "elsewhere")
    with Store.open(database, tmp_path):
        yield found
    found.app.producer.close()


def told(shared: ModuleType, work: Callable[[], Any], end: Callable[[Store], None]) -> Any:
    """What the work gives, whose waiting ends only if somebody is told. `end` is done once all listen."""
    ends = shared.app.awaiting._listener()

    def later() -> None:
        until(lambda: ends.hears.is_set() and ends._waiting, "somebody to listen")
        with Store.open(shared.app.settings().store, Path(shared.app.data)) as store:
            until(lambda: value(store, "SELECT count(*) FROM waiters"), "the waiter to be written down")
            end(store)

    thread = threading.Thread(target=later)
    thread.start()
    try:
        return work()
    finally:
        thread.join()


def test_the_end_of_a_job_is_told_to_processes_without_a_node(shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their own looks are an hour apart."""
    monkeypatch.setattr(awaiting, "_FIRST", 3600.0)
    monkeypatch.setattr(awaiting, "_LAST", 3600.0)
    job = shared.add.enqueue(a=1, b=1)
    assert told(shared, lambda: job.result(60), lambda store: finish(store, job)) == 42
    queued = shared.add.enqueue(a=1, b=1)
    with pytest.raises(JobCancelled):
        told(shared, lambda: asyncio.run(queued.result_async(60)), lambda store: store.jobs.cancel(queued, store.now()))
    assert shared.app.awaiting._listener() is shared.app.awaiting._listener()  # one for all


def test_only_ends_that_somebody_waits_for_are_told(shared, database: str) -> None:
    waited, other = shared.add.enqueue(a=1, b=1), shared.add.enqueue(a=1, b=1)
    store = shared.app.producer.store()
    store.jobs.await_end(waited, store.now() + 60_000)
    store.jobs.await_end(other, store.now() - 1)  # nobody waits for it any more
    store.jobs.await_end(waited, store.now() + 60_000)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("LISTEN ostler_ostler_ended")
        store.jobs.cancel(other, store.now())
        store.jobs.cancel(waited, store.now())
        assert [n.payload for n in connection.notifies(timeout=20, stop_after=1)] == [str(waited)]


# ---- in a Bench


def test_a_bench_gives_results_and_refuses_to_wait_forever(alone) -> None:
    with Bench(alone.app) as bench:
        job = bench.enqueue(alone.add, 1, b=2)
        assert (job.result(), job.status(), asyncio.run(job.result_async())) == (3, "done", 3)
        hangs = bench.enqueue(alone.asks)
        bench.run()
        with pytest.raises(JobFailed, match="without a timeout"):
            hangs.result()
