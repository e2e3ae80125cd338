"""A store that does not answer delays; it loses nothing, and nothing runs without a record."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import pytest

from ostler.store import now_ms
from ostler.store.rows import NewJob
from tests import stores
from tests.harness import Node, call, until
from tests.store.counted import counted

both = pytest.mark.usefixtures("store_url")


@contextmanager
def locked(node: Node) -> Iterator[None]:
    with node.open_store() as other, stores.locked(other):
        yield


@both
def test_a_locked_store_delays_and_loses_nothing(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=2", OSTLER_HEARTBEAT_INTERVAL="1", OSTLER_STALE_AFTER="5")
    flag = tmp_path / "go"
    running = node.enqueue("wait_for", path=str(flag))
    busy = node.wait_running(running)["component"]
    idle = "worker:work:1" if busy == "worker:work:0" else "worker:work:0"
    marks = tmp_path / "marks"
    with locked(node):
        flag.touch()  # its result has to wait

        answers: list[tuple[int, dict]] = []
        body = {"task": "mark", "args": {"path": str(marks)}}
        sender = threading.Thread(target=lambda: answers.append(call(node.url, "POST", "/api/v1/jobs", body)))
        sender.start()
        victim = node.worker(idle)
        os.kill(victim["pid"], signal.SIGKILL)  # a restart does not wait for the store either
        until(lambda: f"{idle} generation {victim['generation'] + 1}: starting -> healthy" in node.log(), "the restart")
        assert node.get("/healthz")[0] == 200
        until(lambda: node.get("/api/v1/health")[1]["status"] == "error", "the trouble to show")
        for sign in ("lane turns keeps trying", "lane intake keeps trying", "HEARTBEAT_DEGRADED"):
            until(lambda: sign in node.log(), f"{sign!r} in the log")
        assert not answers, "it cannot be stored yet"
        assert not marks.exists()

    sender.join(60)
    status, job = answers[0]
    assert status == 201
    done = node.wait_job(running)
    assert (done["status"], done["attempt"]) == ("done", 1)
    assert node.wait_job(job["id"])["status"] == "done"
    assert len(marks.read_text().splitlines()) == 1
    row = node.wait_worker(
        idle, "the record to catch up", lambda w: w["restart_count"] == 1 and w["status"] == "healthy"
    )
    assert row["generation"] == victim["generation"] + 1
    until(lambda: node.get("/api/v1/health")[1]["status"] == "healthy", "all to be well again")


@both
def test_an_enqueue_that_cannot_be_stored_is_refused_and_stores_nothing(make_node) -> None:
    node = make_node("--pool", "work=1", OSTLER_STORE_PATIENCE="0.2")
    with locked(node):
        status, answer = node.post("/api/v1/jobs", {"task": "add", "args": {"a": 1}})
        assert (status, answer["error"]["code"]) == (503, "STORE_BUSY")
    assert node.get("/api/v1/jobs")[1]["jobs"] == []
    until(lambda: node.get("/readyz")[0] == 200, "readiness without another enqueue")


def test_a_node_stops_in_bounded_time_while_the_store_is_locked(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1", OSTLER_STOP_GRACE="0.3", OSTLER_STORE_PATIENCE="1")
    flag = tmp_path / "go"
    job = node.enqueue("wait_for", path=str(flag))
    node.wait_running(job)
    with locked(node):
        flag.touch()
        node.signal(signal.SIGTERM)
        assert node.wait(55) == 0
    node.start()
    assert node.wait_job(job)["status"] == "done"


def test_a_node_that_starts_while_its_file_is_locked_says_so_and_ends(make_node) -> None:
    node = make_node("--pool", "work=1")
    node.stop()
    with locked(node):
        node.start_process()
        assert node.wait(55) == 2
        assert "cannot be used right now (" in node.log()
        assert "Traceback" not in node.log()
    node.start()
    assert node.wait_job(node.enqueue("add", a=1))["status"] == "done"


def test_a_node_that_starts_while_its_server_is_locked_says_so_and_waits(database: str, make_node) -> None:
    node = make_node("--pool", "work=1", OSTLER_STORE=database)
    node.stop()
    with locked(node):
        node.start_process()
        until(lambda: "waiting for the store" in node.log(), "the node to say that it waits")
        assert "cannot be used right now (" in node.log()
        assert "Traceback" not in node.log()
    node.await_up(node.pid)
    assert node.wait_job(node.enqueue("add", a=1))["status"] == "done"


@both
def test_readiness_comes_back_after_a_refused_enqueue(make_node) -> None:
    node = make_node("--pool", "work=1", OSTLER_STORE_PATIENCE="0.2")
    with locked(node):
        assert node.post("/api/v1/jobs", {"task": "add", "args": {"a": 1}})[0] == 503
    until(lambda: node.get("/readyz")[0] == 200, "readiness without another enqueue")


@both
def test_patience_holds_while_upkeep_waits_for_a_locked_store_and_a_stop_is_quick(make_node) -> None:
    node = make_node(
        "--pool", "work=1", OSTLER_STORE_PATIENCE="1", OSTLER_UPKEEP_INTERVAL="0.1", OSTLER_STOP_GRACE="0.3"
    )
    with locked(node):
        until(lambda: "lane upkeep keeps trying" in node.log(), "upkeep to meet the lock")
        for path, body in (("/api/v1/jobs", {"task": "add", "args": {"a": 1}}), ("/api/v1/pools/work/pause", None)):
            asked = time.monotonic()
            status, answer = node.post(path, body)
            assert (status, answer["error"]["code"]) == (503, "STORE_BUSY")
            assert time.monotonic() - asked < 15, path  # seen before: for as long as the lock was held
        node.signal(signal.SIGTERM)
        assert node.wait(40) == 0  # as long as the systemd unit waits for it


def test_a_deleted_database_makes_health_an_error_and_refuses_enqueues(make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1")
    node.wait_job(node.enqueue("add", a=1))
    for path in node.folder.glob("ostler.db*"):
        path.rename(tmp_path / path.name)
    status, answer = node.post("/api/v1/jobs", {"task": "add", "args": {"a": 1}})
    assert (status, answer["error"]["code"]) == (503, "STORE_GONE")
    assert "was deleted while it was in use" in answer["error"]["message"]
    until(lambda: node.get("/api/v1/health")[1]["status"] == "error", "health to say so")


def test_a_deleted_log_of_the_database_is_noticed_too_and_an_orderly_stop_saves_what_was_in_it(make_node) -> None:
    node = make_node("--pool", "work=1")
    job = node.enqueue("add", a=1)
    node.wait_job(job)
    (node.folder / "ostler.db-wal").unlink()

    def enqueue() -> tuple[int, dict]:
        return node.post("/api/v1/jobs", {"task": "add", "args": {"a": 1}})

    until(lambda: enqueue()[0] != 201, "an enqueue to be refused")
    status, answer = enqueue()
    assert (status, answer["error"]["code"]) == (503, "STORE_GONE")
    assert "ostler.db-wal, which is a part of the database, was deleted" in answer["error"]["message"]
    until(lambda: node.get("/api/v1/health")[1]["status"] == "error", "health to say so")
    assert node.stop() == 0
    node.start()
    assert node.job(job)["status"] == "done"
    assert node.wait_job(node.enqueue("add", a=1))["status"] == "done"


def test_health_is_an_error_also_when_the_database_was_deleted_before_anybody_looked(make_node) -> None:
    """Some connections are opened when they are first used."""
    node = make_node("--pool", "work=1", ready=False)
    for path in node.folder.glob("ostler.db*"):
        path.unlink()
    status, health = node.get("/api/v1/health")
    assert (status, health["status"]) == (200, "error")
    assert any("was deleted while it was in use" in error for error in health["errors"])
    status, answer = node.get("/api/v1/jobs")
    # A connection that was open already may go on reading.
    assert status == 200 or (status, answer["error"]["code"]) == (503, "STORE_GONE")
    assert not (node.folder / "ostler.db").exists(), "nothing is stored where nobody will look for it"


@both
def test_queue_depths_are_right_after_kills_in_the_middle_of_the_work(make_node) -> None:
    node = make_node("--pool", "work=2")
    flood = [NewJob("mixed", "work", "{}", run_at=now_ms() + 10**9 if n % 10 == 0 else None) for n in range(2000)]
    with node.open_store() as store:
        for _ in range(3):
            store.jobs.enqueue(flood, now_ms())
            store.db.ring_all()
            until(lambda: store.jobs.depths()["work"].get("processing"), "it to begin")
            node.kill()
            assert store.jobs.depths() == counted(store)
            node.start()
        store.jobs.cancel_many(now_ms(), 100, queue="work")
        until(lambda: store.jobs.depths()["work"].keys() <= {"scheduled", "cancelled"}, "all the others to end")
        assert store.jobs.depths() == counted(store)
