"""Counters: written with what they count, once, and never apart from it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from ostler.store import Store
from ostler.store import queries
from ostler.store.live import COARSE, FINE, bin_of
from ostler.store.rows import Finish, NewJob, Requeue, Turn

NOW = 1_700_000_003_000
SECOND = NOW // 1000


def put(store: Store, count: int = 1, at: int = NOW - 500, **more) -> list[int]:
    return store.jobs.enqueue([NewJob("t", "q", "{}", **more)] * count, at)


def claim(store: Store, count: int = 1, at: int = NOW):
    return store.turns.take(Turn("n", at, wants={"q": ["worker:q:0"] * count})).claims


def finish(c, status: str = "done", took: int = 40, crash: int = 0) -> Finish:
    return Finish(c.id, c.fence, status, NOW, NOW + took, status, crash=crash)


def end(store: Store, *finishes: Finish, requeues: tuple[Requeue, ...] = (), at: int = NOW):
    return store.turns.take(Turn("n", at, finishes=list(finishes), requeues=list(requeues)))


def counted(store: Store) -> dict[str, int]:
    found = store.live.tallies.newest(NOW + 60_000).get("q", {})
    return {
        name: n for name, n in found.items() if name in ("done", "failed", "cancelled", "retried", "crashed", "run_ms")
    }


def test_each_end_is_counted_once(store: Store) -> None:
    put(store, 5)
    a, b, c, d, e = claim(store, 5)
    end(
        store,
        finish(a),
        finish(b, "failed"),
        finish(c, "cancelled"),
        requeues=(
            Requeue(d.id, d.fence, "requeued:retry", NOW),
            Requeue(e.id, e.fence, "requeued:crash", NOW, crash=1),
        ),
    )
    assert counted(store) == {"done": 1, "failed": 1, "cancelled": 1, "retried": 1, "crashed": 1, "run_ms": 40}
    assert store.live.tallies.totals() == {"q": {"done": 1, "failed": 1, "cancelled": 1, "run_ms": 40}}


def test_a_job_that_fails_by_a_crash_counts_as_both(store: Store) -> None:
    put(store)
    (c,) = claim(store)
    end(store, finish(c, "failed", crash=1))
    assert counted(store) == {"failed": 1, "crashed": 1}


def test_a_lost_claim_counts_nothing(store: Store) -> None:
    put(store)
    (ghost,) = claim(store)
    end(store, requeues=(Requeue(ghost.id, ghost.fence, "requeued:stale", NOW, excused=1),))
    (heir,) = claim(store)
    before = counted(store)
    assert end(store, finish(ghost), finish(ghost, "failed")).lost == [ghost.id]
    late = Requeue(ghost.id, ghost.fence, "requeued:crash", NOW, crash=1)
    assert end(store, requeues=(late,)).lost == [ghost.id]
    assert counted(store) == before == {}
    end(store, finish(heir))
    assert end(store, finish(heir)).lost == [heir.id]  # the same result twice
    assert counted(store) == {"done": 1, "run_ms": 40}


def test_a_turn_that_is_rolled_back_counts_nothing(store: Store, monkeypatch) -> None:
    put(store)
    (c,) = claim(store)
    monkeypatch.setattr(store.turns._changes, "timeline", lambda events: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        end(store, finish(c))
    monkeypatch.undo()
    assert counted(store) == {}
    assert store.jobs.get(c.id)["status"] == "processing"
    monkeypatch.setattr(store.turns._changes._tallies, "add", lambda counts, now: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        end(store, finish(c))
    monkeypatch.undo()
    assert store.jobs.get(c.id)["status"] == "processing"  # never one without the other


def test_operators_cancels_are_counted(store: Store) -> None:
    first, second, running = put(store, 3)
    store.jobs.cancel(first, NOW)
    store.jobs.cancel_many(NOW, 10, ids=[second])
    (c,) = claim(store)
    assert store.jobs.cancel(running, NOW) == "processing"
    assert counted(store) == {"cancelled": 2}  # the running one has only been asked
    end(store, requeues=(Requeue(c.id, c.fence, "requeued:returned", NOW),))
    assert store.jobs.get(running)["status"] == "cancelled"
    assert counted(store) == {"cancelled": 3}
    assert store.live.tallies.totals()["q"] == {"cancelled": 3}


def test_durations_and_waits_are_binned_and_only_the_first_wait_counts(store: Store) -> None:
    put(store)
    (c,) = claim(store)
    end(store, requeues=(Requeue(c.id, c.fence, "requeued:retry", NOW),))
    (again,) = claim(store)
    end(store, finish(again, took=40))
    found = store.live.tallies.newest(NOW + 60_000)["q"]
    assert {name: n for name, n in found.items() if ":" in name} == {f"wait:{bin_of(500)}": 1, f"run:{bin_of(40)}": 1}


def test_averages_are_of_the_last_hour_and_per_queue(store: Store) -> None:
    tallies = store.live.tallies
    tallies.add({("q", "done"): 2, ("q", "run_ms"): 3000, ("r", "done"): 1, ("r", "run_ms"): 500}, NOW)
    tallies.add({("q", "done"): 100, ("q", "run_ms"): 1}, NOW - 2 * 3600_000)
    tallies.add({("s", "failed"): 1}, NOW)  # nothing done: no average, and no division by nothing
    assert tallies.averages(NOW) == {"q": 1.5, "r": 0.5}
    assert tallies.averages(NOW + 2 * 3600_000) == {}
    assert tallies.totals()["q"] == {"done": 102, "run_ms": 3001}


def test_newest_and_series(store: Store) -> None:
    tallies = store.live.tallies
    for ago, n in ((0, 1), (4, 2), (25, 4), (700, 8)):
        tallies.add({("q", "done"): n, ("r", "failed"): 1}, NOW - ago * 1000)
    begin = SECOND - SECOND % FINE
    assert tallies.newest(begin * 1000)["q"] == {"at": begin, "done": 1}
    fine = tallies.series(FINE, SECOND - 60, "q")
    assert [(p["at"], p["done"]) for p in fine] == [(begin - 30, 4), (begin - 10, 2), (begin, 1)]
    assert sum(p["done"] for p in tallies.series(COARSE, SECOND - 3600, "q")) == 15
    both = tallies.series(3600, SECOND - 7200)
    assert (sum(p["done"] for p in both), sum(p["failed"] for p in both)) == (15, 4)
    assert [p["at"] for p in both] == sorted({p["at"] - p["at"] % 3600 for p in both})
    assert tallies.series(FINE, SECOND - 60, "nobody") == []


def test_purge_keeps_the_totals(store: Store) -> None:
    tallies = store.live.tallies
    tallies.add({("q", "done"): 1}, NOW)
    tallies.purge(NOW + 3 * 3600_000)
    assert tallies.series(FINE, 0) == []
    assert len(tallies.series(COARSE, 0)) == 1
    tallies.purge(NOW + 9 * 86_400_000)
    assert tallies.series(COARSE, 0) == []
    assert tallies.totals() == {"q": {"done": 1}}


def test_an_older_database_gets_its_totals_from_its_jobs(tmp_path: Path) -> None:
    path = tmp_path / "ostler.db"
    old = sqlite3.connect(path)
    old.executescript(next(script for number, _, script in queries.migrations("sqlite") if number == 1))
    for job, (status, began, ended) in enumerate(
        [("done", 1000, 3000), ("done", 2000, 2500), ("failed", 1, 2), ("cancelled", None, 9), ("queued", None, None)],
        1,
    ):
        old.execute(
            "INSERT INTO jobs (id, task, queue, args, status, attempts, created_at, started_at, finished_at)"
            " VALUES (?, 't', 'q', '{}', ?, 3, 1, ?, ?)",
            (job, status, began, ended),
        )
    old.execute("PRAGMA user_version = 1")
    old.commit()
    old.close()
    for _ in range(2):  # the second time there is nothing left to do
        with Store.open("", tmp_path) as store:
            assert store.live.tallies.totals() == {"q": {"done": 2, "failed": 1, "cancelled": 1, "run_ms": 2500}}
            assert store.live.incidents() == []
    with Store.open("", tmp_path) as store:
        (c,) = claim(store)
        end(store, finish(c))
        assert store.live.tallies.totals()["q"]["done"] == 3


def test_a_bucket_from_before_the_clock_was_set_back_is_not_the_newest(store: Store) -> None:
    store.live.tallies.add({("q", "done"): 7}, NOW + 86_400_000)
    store.live.tallies.add({("q", "done"): 1}, NOW)
    assert store.live.tallies.newest(NOW)["q"] == {"at": SECOND - SECOND % FINE, "done": 1}
