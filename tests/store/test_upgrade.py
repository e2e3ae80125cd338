"""A store that an older version wrote: it upgrades, and a node finishes everything in it."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from ostler.store import Store
from ostler.store.rows import NewJob
from tests.harness import until

DUMP = Path(__file__).parent / "fixtures" / "schema-2.sql"
FEATURED = Path(__file__).parents[1] / "featured.py"


def restored(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    connection = sqlite3.connect(folder / "ostler.db")
    connection.executescript(DUMP.read_text(encoding="utf-8"))
    connection.close()
    return folder


def test_an_older_store_upgrades_and_keeps_what_it_knows(tmp_path: Path) -> None:
    with Store.open("", restored(tmp_path)) as store:
        (exit_,) = store.health.exits("before", "worker:work:1")
        assert (exit_["item"], exit_["counted"]) == ("job:19", True)
        assert [w["status"] for w in store.health.get_all_workers() if w["component"] == "worker:work:1"] == ["failed"]
        assert {job["status"] for job in store.jobs.list()[0]} == {
            "queued",
            "processing",
            "done",
            "failed",
            "cancelled",
        }


def test_an_id_that_an_older_store_has_given_is_not_given_again(tmp_path: Path) -> None:
    folder = restored(tmp_path)
    with sqlite3.connect(folder / "ostler.db") as old:
        (newest,) = old.execute("SELECT max(id) FROM jobs").fetchone()
        old.execute("DELETE FROM jobs WHERE id = ?", (newest,))  # purged, and remembered by AUTOINCREMENT alone
    with Store.open("", folder) as store:
        assert store.jobs.enqueue([NewJob("t", "q", "{}")], 1000) == [newest + 1]
        assert store.jobs.find(newest)["task"] == "ostler:newest"
        assert newest in store.jobs.retention.purge(done_before=1000, failed_before=None).jobs


def test_no_event_of_an_older_store_is_told_twice_or_lost(tmp_path: Path) -> None:
    folder = restored(tmp_path)
    with sqlite3.connect(folder / "ostler.db") as old:
        stored = old.execute("SELECT job, seq, at, name FROM job_events ORDER BY job, seq").fetchall()
    with Store.open("", folder) as store:
        told = [
            (job, e["seq"], e["at"], e["name"])
            for job in sorted({row[0] for row in stored})
            for e in store.jobs.events(job)
        ]
        assert told == stored
        back = store.turns.recover("before", 1_790_000_001_000, "gone")
        for job in back:
            names = [e["name"] for e in store.jobs.events(job)]
            assert names[-2:] == ["processing", "requeued:stale"]
            assert names.count("processing") == [row[3] for row in stored if row[0] == job].count("processing")


def test_a_node_finishes_everything_in_an_older_store(make_node, tmp_path: Path) -> None:
    folder = restored(tmp_path / "old")
    flags = ("--pool", "work=2", "--pool", "keys=2", "--pool", "slow=1", "--pool", "narrow=1")
    node = make_node(
        *flags,
        app=FEATURED,
        folder=folder,
        ready=False,
        OSTLER_NAME="before",
        OSTLER_RETENTION="0",
        OSTLER_FAILED_RETENTION="0",
    )
    with Store.open("", folder, read_only=True) as store:
        until(lambda: not store.jobs.matching("live", 1), "every job to end")
        found = {job["id"]: store.jobs.get(job["id"]) for job in store.jobs.list(limit=100)[0]}
        assert [job["id"] for job in found.values() if job["status"] == "failed"] == [18, 8]
        assert sorted(
            job["result"]
            for job in found.values()
            if job["task"] == "double" and job["batch"] is None and job["result"]
        ) == [2, 4, 8, 8, 10, 16, 32]
        assert [b["pending"] for b in map(store.jobs.flows.get_batch, (1, 2))] == [0, 0]
        reports = [job["result"] for job in found.values() if job["task"] == "report"]
        assert sorted((r["batch"], r["total"], r["failed"]) for r in reports) == [(1, 3, 0), (2, 2, 1)]
        assert [job["result"] for job in found.values() if job["task"] == "new_year"] == ["happy"]
        assert [w["status"] for w in store.health.get_all_workers() if w["component"] == "worker:work:1"] == ["failed"]
    assert node.stop() == 0
