"""Upkeep: deletes what is too old, in short steps, whatever else goes wrong, and leaks nothing when it is killed."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from pathlib import Path

import pytest

from ostler.config import Settings
from ostler.events import Bus
from ostler.jobs import scratch
from ostler.jobs.upkeep import Upkeep
from ostler.store import Store, now_ms
from ostler.store.lanes import Lane
from ostler.store.rows import Finish, NewJob, Note, Requeue, Turn
from ostler.store.sessions import Admission, Ended, SessionRow
from tests.harness import until
from tests.store.test_calls import call
from tests.stores import value

FEATURED = Path(__file__).resolve().parent.parent / "featured.py"


def clean(folder: Path, **settings) -> None:
    """One round of upkeep on the store there."""

    async def main() -> None:
        known = Settings(data=str(folder), **{"retention": 1.0, "failed_retention": 1.0, **settings})
        url = os.environ["OSTLER_STORE"]
        lane = Lane("t", lambda: Store.open(url, folder, durable=False), asyncio.get_running_loop())
        await lane.start()
        await Upkeep(known, lane, lane, Bus(), lambda: None, lambda store: []).clean()
        await lane.stop()

    asyncio.run(main())


def ended(store: Store, count: int, at: int = 1000, events: int = 0) -> list[int]:
    """Jobs that ended at that time."""
    ids = store.jobs.enqueue([NewJob("t", "q", "{}") for _ in range(count)], at)
    claims = store.turns.take(Turn("n", at, wants={"q": ["w"] * count})).claims
    notes = [Note(c.id, c.fence, "said", at) for c in claims for _ in range(events)]
    ends = [Finish(c.id, c.fence, "done", at, at, "done") for c in claims]
    store.turns.take(Turn("n", at, notes=notes, finishes=ends))
    return ids


def newest(store: Store) -> int:
    """A job that is not old. The newest one is never deleted: the next id follows on it."""
    return store.jobs.enqueue([NewJob("t", "other", "{}")], now_ms())[0]


def left(store: Store) -> tuple[int, int, int]:
    return tuple(value(store, f"SELECT count(*) FROM {t}") for t in ("jobs", "job_events", "purged"))


def test_one_round_deletes_all_that_is_old_however_much_it_is(store: Store, tmp_path: Path) -> None:
    for _ in range(3):
        ended(store, 3000)
    newest(store)
    clean(tmp_path)
    assert left(store) == (1, 0, 0)


def test_the_call_log_is_kept_within_its_age_and_number(store: Store, tmp_path: Path) -> None:
    now = now_ms() * 1000
    store.calls.add([call(now - 10_000_000_000 + n) for n in range(500)] + [call(now + n) for n in range(50)])
    clean(tmp_path, calls_retention=0.0, calls_kept=0)
    assert len(store.calls.list(limit=1000)[0]) == 550
    clean(tmp_path, calls_retention=3600.0)
    assert len(store.calls.list(limit=1000)[0]) == 50
    clean(tmp_path, calls_kept=20)
    assert [row["id"] for row in store.calls.list(limit=1000)[0]] == [now + n for n in range(49, 29, -1)]


def test_ended_sessions_are_kept_within_their_age_and_number(store: Store, tmp_path: Path) -> None:
    about = Admission("", "worker:browsers:0", 1, "browsers", "chromium", "token")
    now = now_ms()

    def row(n: int, at: int) -> SessionRow:
        return SessionRow.begun("a@1", about._replace(id=f"s{n}"), at).over(Ended(f"s{n}", "client"), at)

    store.sessions.add([row(n, now - 10_000_000) for n in range(500)] + [row(n, now + n) for n in range(500, 550)])
    clean(tmp_path, sessions_retention=0.0, sessions_kept=0)
    assert len(store.sessions.list(limit=1000)[0]) == 550
    clean(tmp_path, sessions_retention=3600.0)
    assert len(store.sessions.list(limit=1000)[0]) == 50
    clean(tmp_path, sessions_kept=20)
    assert [row["id"] for row in store.sessions.list(limit=1000)[0]] == [f"s{n}" for n in range(549, 529, -1)]


def test_a_long_timeline_is_deleted_in_parts(store: Store, tmp_path: Path) -> None:
    ended(store, 1, events=7000)
    ended(store, 3)
    newest(store)
    assert store.jobs.retention.purge(done_before=5000, failed_before=None) == ([], True)
    assert left(store) == (5, 5000, 0)
    clean(tmp_path)
    assert left(store) == (1, 0, 0)


def test_a_job_from_a_clock_that_was_ahead_does_not_keep_the_others(store: Store, tmp_path: Path) -> None:
    (ahead,) = ended(store, 1, at=now_ms() + 10**9)
    ended(store, 3)
    last = newest(store)
    clean(tmp_path)
    assert [job["id"] for job in store.jobs.list()[0]] == [last, ahead]


def test_a_part_that_fails_does_not_stop_the_others(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scratch, "sweep", lambda root, **limits: 1 // 0)
    monkeypatch.setattr(Upkeep, "_clock", lambda self: 1 // 0)
    (job,) = ended(store, 1)
    newest(store)
    log = tmp_path / "logs" / "jobs" / "0" / f"{job}.log"
    log.parent.mkdir(parents=True)
    log.write_text("what it printed")
    clean(tmp_path)
    assert left(store) == (1, 0, 0)
    assert not log.exists()
    assert "sweeping scratch: failed; continuing with the rest" in caplog.text


def test_folders_that_no_job_can_have_do_not_stop_the_sweep_of_scratch(store: Store, tmp_path: Path, caplog) -> None:
    """A job may write beside its own directory."""
    for name in ("²", "9" * 30, "7"):
        (tmp_path / "scratch" / name).mkdir(parents=True)
        os.utime(tmp_path / "scratch" / name, (1, 1))
    clean(tmp_path)
    assert sorted(path.name for path in (tmp_path / "scratch").iterdir()) == ["9" * 30, "²"]
    assert "failed" not in caplog.text


def test_others_write_while_a_large_purge_is_under_way(store: Store, tmp_path: Path) -> None:
    for _ in range(3):
        ended(store, 3000)
    purge = threading.Thread(target=clean, args=(tmp_path,))
    stored = 0
    with Store.open(os.environ["OSTLER_STORE"], tmp_path, busy_timeout=30.0) as other:
        purge.start()
        while purge.is_alive():
            other.jobs.enqueue([NewJob("t", "q", "{}")], now_ms())
            stored += 1
    purge.join()
    assert stored > 5
    assert left(store)[0] == stored


@pytest.mark.usefixtures("store_url")
def test_a_node_killed_between_rows_and_files_leaves_no_files(make_node) -> None:
    node = make_node("--pool", "work=1", app=FEATURED, OSTLER_UPKEEP_INTERVAL="0.3", OSTLER_RETENTION="0")
    jobs = [node.enqueue("publishes"), node.enqueue("talks", text="x")]
    for job in jobs:
        node.wait_job(job)
    log = node.folder / "logs" / "jobs" / "0" / f"{jobs[1]}.log"
    artifact = node.folder / "results" / str(jobs[0])
    until(log.exists, "the log")
    node.kill()
    with node.open_store() as store:  # the rows went, and then the node was killed
        newest(store)
        assert sorted(store.jobs.retention.purge(done_before=now_ms() + 1, failed_before=None).jobs) == jobs
    assert artifact.exists()
    node.start()
    until(lambda: not artifact.exists(), "the artifact to go")
    until(lambda: not log.exists(), "the log to go")
    with node.open_store(read_only=True) as store:
        until(lambda: not store.jobs.retention.files(), "the list to be worked off")


def test_what_a_killed_publish_left_is_deleted_after_a_day(store: Store, tmp_path: Path) -> None:
    old, young = tmp_path / "results/.parts/1.99.1", tmp_path / "results/.parts/2.99.1"
    for path in (old, young):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    os.utime(old, (time.time() - 100_000,) * 2)
    clean(tmp_path)
    assert [path.exists() for path in (old, young)] == [False, True]


def test_keys_and_batches_that_hold_nothing_are_deleted(store: Store, tmp_path: Path) -> None:
    store.jobs.enqueue([NewJob("t", "other", "{}", unique_key=f"live{n}") for n in range(600)], 1)
    store.jobs.enqueue([NewJob("t", "q", "{}", unique_key=f"dead{n}") for n in range(600)], 1)
    store.jobs.flows.batch([NewJob("t", "q", "{}")], None, 1)
    chain = json.dumps([{"task": "t", "queue": "q", "args": "{}"}])
    store.jobs.enqueue([NewJob("t", "q", "{}", next=chain)], 1)
    while claims := store.turns.take(Turn("n", 2, wants={"q": ["w"] * 700})).claims:
        store.turns.take(Turn("n", 2, finishes=[Finish(c.id, c.fence, "done", 2, 2, "done") for c in claims]))
    newest(store)
    clean(tmp_path)
    assert [value(store, f"SELECT count(*) FROM {t}") for t in ("uniques", "batches", "steps")] == [600, 0, 0]


@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_node_whose_clock_is_days_off_deletes_and_hurries_nothing(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    monkeypatch.setenv("OSTLER_STORE", database)
    with Store.open(database, tmp_path) as store:
        now, days = store.now(), wrong * 10 * 86_400_000
        (done,) = ended(store, 1, at=now)
        (kept,) = store.jobs.enqueue([NewJob("t", "keyed", "{}", unique_key="k", unique_for=3600)], now)
        (retried,) = store.jobs.enqueue([NewJob("t", "q", "{}")], now)
        (c,) = store.turns.take(Turn("n", now, wants={"q": ["w"]})).claims
        store.turns.take(Turn("n", now, requeues=[Requeue(c.id, c.fence, "requeued:retry", now, run_at=now + 60_000)]))
        newest(store)
        ours = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: ours() + days * 1_000_000)
        clean(tmp_path, retention=3600.0)
        monkeypatch.setattr(time, "time_ns", ours)
        assert store.jobs.get(done)["status"] == "done"
        assert store.jobs.enqueue([NewJob("t", "keyed", "{}", unique_key="k", unique_for=3600)], store.now()) == [kept]
        assert store.jobs.get(retried)["run_at"] == now + 60_000


def test_a_retry_waits_no_longer_than_it_should_after_the_clock_was_set_back(store: Store, tmp_path: Path) -> None:
    now, days = now_ms(), 5 * 86_400_000
    retried, chosen = store.jobs.enqueue(
        [NewJob("t", "q", "{}"), NewJob("t", "later", "{}", run_at=now + 2 * days)], now
    )
    (c,) = store.turns.take(Turn("n", now + days, wants={"q": ["w"]})).claims  # the clock is days ahead
    back = Requeue(c.id, c.fence, "requeued:retry", now + days, run_at=now + days + 4000)
    store.turns.take(Turn("n", now + days, requeues=[back]))
    clean(tmp_path)
    assert now + 4000 <= store.jobs.get(retried)["run_at"] <= now_ms() + 4000
    assert store.jobs.get(chosen)["run_at"] == now + 2 * days
