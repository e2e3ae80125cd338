"""Different versions of an app, or different apps, on the nodes of one store."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path

from ostler.store import Store
from ostler.store.rows import NewJob
from tests.nodes.checks import check_depths, check_timelines
from tests.nodes.fleet import Fleet, Member

APP = Path(__file__).with_name("deployed.py")
TASKS = ("stays", "goes", "comes")


class Producing:
    """Stores a job of every task again and again, from a thread, as producers of both versions do."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet, self._stopping = fleet, threading.Event()
        self.jobs: dict[str, list[int]] = {task: [] for task in TASKS}
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Producing:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        with Store.open(self._fleet.url, self._fleet.folder) as store:
            for n in itertools.count():
                for task in TASKS:
                    self.jobs[task] += store.jobs.enqueue([NewJob(task, "work", f'{{"n": {n}}}')], store.now())
                if self._stopping.wait(0.05):
                    return


def test_a_rolling_deploy_loses_nothing_and_fails_nothing(fleet: Fleet) -> None:
    """One task is added and one removed. What no node can run waits, and goes on when a node can."""
    old = fleet.nodes(3, "--pool", "work=1", app=APP, DEPLOYED="goes")
    done = "SELECT count(*) FROM ostler.jobs WHERE task = %s AND status = 'done'"
    with Producing(fleet) as producing:
        for node in old:
            before = fleet.one(done, "stays")
            assert node.stop() == 0
            fleet.node("--pool", "work=1", app=APP, DEPLOYED="comes", folder=node.folder)
            fleet.until(lambda before=before: fleet.one(done, "stays") > before, "jobs to go on")
        fleet.until(lambda: fleet.one(done, "comes"), "the new task to run")
        parked = "SELECT count(*) FROM ostler.jobs WHERE task = 'goes' AND status = 'queued' AND later = 2"
        fleet.until(lambda: fleet.one(parked), "the old task to wait out of line")
        assert "task 'goes', which no running node declares" in _complaint(fleet)
    fleet.wait_all(producing.jobs["stays"] + producing.jobs["comes"])
    left = fleet.rows("SELECT status, count(*) AS n FROM ostler.jobs WHERE task = 'goes' GROUP BY status")
    assert {row["status"] for row in left} == {"done", "queued"}
    fleet.node("--pool", "work=1", app=APP, DEPLOYED="goes")  # the deploy is taken back on one node
    fleet.wait_all([job for jobs in producing.jobs.values() for job in jobs])
    jobs = fleet.rows("SELECT id, task, status, seq FROM ostler.jobs ORDER BY id")
    assert len(jobs) == sum(map(len, producing.jobs.values()))
    check_timelines(fleet, jobs)
    check_depths(fleet)


def _complaint(fleet: Fleet) -> str:
    def found() -> str:
        return " ".join(_living(fleet).get("/api/v1/health")[1]["errors"])

    return str(
        fleet.until(lambda: found() if "which no running node declares" in found() else "", "health to complain")
    )


def _living(fleet: Fleet) -> Member:
    return fleet.members[-1]


def missed(fleet: Fleet) -> None:
    """Every schedule's time has come while nobody looked."""
    ago = "(extract(epoch FROM clock_timestamp()) * 1000)::bigint - 1000"
    fleet.rows(f"UPDATE ostler.schedules SET next_at = {ago} RETURNING name")


def fired(fleet: Fleet, name: str) -> int:
    which = {"nightly": '{"n":0}', "hourly": '{"n":1}'}[name]
    return int(fleet.one("SELECT count(*) FROM ostler.jobs WHERE replace(args, ' ', '') = %s", which))


def test_a_schedule_fires_once_over_three_nodes(fleet: Fleet) -> None:
    flags = {"app": APP, "DEPLOYED": "nightly"}
    first = fleet.node("--pool", "work=1", **flags)
    first.stop()
    missed(fleet)
    fleet.nodes(3, "--pool", "work=1", **flags)
    fleet.until(lambda: fired(fleet, "nightly"), "it to fire")
    assert fleet.one("SELECT count(*) FROM ostler.schedules WHERE last_job IS NOT NULL") == 1
    fleet.until(lambda: fleet.one("SELECT count(*) FROM ostler.jobs WHERE status = 'done'") == 1, "its job to be done")
    assert fired(fleet, "nightly") == 1


def test_a_schedule_belongs_to_the_app_that_declares_it(fleet: Fleet) -> None:
    """Another app on the same database neither fires it nor deletes it, also while no node of its app runs."""
    one = fleet.node("--pool", "work=1", app=APP, DEPLOYED="nightly goes")
    other = fleet.node("--pool", "work=1", app=APP, DEPLOYED="hourly")
    names = "SELECT name FROM ostler.schedules ORDER BY name"
    assert [row["name"] for row in fleet.rows(names)] == ["hourly", "nightly"]
    one.stop()
    other.stop()
    missed(fleet)
    other.start()
    fleet.until(lambda: fired(fleet, "hourly"), "its own to fire")
    gone = "SELECT gone FROM ostler.tasks WHERE name = 'goes'"
    fleet.until(lambda: fleet.one(gone) == 1, "what the other app declared to be gone")
    assert fired(fleet, "nightly") == 0
    one.start()
    fleet.until(lambda: fired(fleet, "nightly"), "what it missed to fire")
    assert (fired(fleet, "nightly"), fired(fleet, "hourly")) == (1, 1)
