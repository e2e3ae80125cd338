"""Incidents: the words, what is one incident and what is two, and that they are kept."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ostler.events import Backpressure, Bus, JobEnded, PoolPaused, Recovered, StoreAnswers, WorkerMoved
from ostler.lifecycle import ends
from ostler.live import incidents as module
from ostler.live.incidents import KEPT, Incidents, crash, failures
from ostler.store import Store

KILLED = WorkerMoved(
    "worker:work:0", 1, "healthy", "crashed", reason="signal", how="was killed by SIGKILL", delay=0.5, item="job:7"
)
HEALTHY = WorkerMoved("worker:work:0", 2, "starting", "healthy", pid=1)


def ended(event: str, job: int = 7, code: str | None = None, task: str = "cut") -> JobEnded:
    return JobEnded(job, task, "work", "worker:work:0", event, 1.0, code)


@pytest.mark.parametrize(
    ("event", "job", "back", "says"),
    [
        (
            KILLED,
            ended("requeued:crash", code="CRASH"),
            None,
            "worker:work:0 was killed by SIGKILL; restarts in 0.5 s, job 7 requeued",
        ),
        (
            KILLED,
            ended("requeued:crash"),
            1.24,
            "worker:work:0 was killed by SIGKILL; restarted after 1.2 s, job 7 requeued",
        ),
        (
            KILLED,
            ended("failed", code="WORKER_CRASHED"),
            12.3,
            "worker:work:0 was killed by SIGKILL; restarted after 12 s, job 7 failed as WORKER_CRASHED",
        ),
        (
            KILLED,
            ended("cancelled"),
            None,
            "worker:work:0 was killed by SIGKILL; restarts in 0.5 s, job 7 cancelled",
        ),
        (
            KILLED,
            ended("failed", job=6, code="OLD"),  # of the run before: says nothing about this one
            None,
            "worker:work:0 was killed by SIGKILL; restarts in 0.5 s, job 7 requeued",
        ),
        (
            WorkerMoved(
                "worker:tag:3",
                1,
                "healthy",
                "crashed",
                reason="oom",
                how=ends.words("oom", -9, "SIGKILL", long=True),
                delay=2.0,
            ),
            None,
            None,
            "worker:tag:3 was killed by SIGKILL, probably out of memory (the kernel counted an out-of-memory kill); restarts in 2 s",
        ),
        (
            WorkerMoved("worker:tag:3", 1, "starting", "crashed", reason="exit", how="exited with code 3", delay=None),
            None,
            None,
            "worker:tag:3 exited with code 3; it is not restarted",
        ),
    ],
)
def test_a_crash_in_words(event, job, back, says: str) -> None:
    assert crash(event, job, back) == says


def test_failures_in_words() -> None:
    one = ended("failed", code="VALIDATION")
    assert failures(one, 1) == "job 7 (cut) failed: VALIDATION"
    assert failures(one, 12) == "12 jobs of task cut failed with VALIDATION, the last is job 7"


class Scene:
    """Incidents on a bus, with a store in this thread."""

    def __init__(self, store: Store) -> None:
        self.bus, self.store, self.changes = Bus(), store, 0
        self.of = Incidents("n1", self.bus, self, self._changed)

    def _changed(self) -> None:
        self.changes += 1

    async def call(self, work, *, patience=None):
        return work(self.store)

    def post(self, work) -> None:
        work(self.store)

    def say(self, *events) -> list[str]:
        for event in events:
            self.bus.send(event)
        return self.texts

    @property
    def texts(self) -> list[str]:
        return [i.text for i in self.of.last]


def on_stage(store: Store, play) -> None:
    async def main() -> None:
        scene = Scene(store)
        await play(scene)
        await scene.of.stop()

    asyncio.run(main())


def test_a_crash_is_one_incident_that_is_rewritten_when_the_worker_is_back(store: Store) -> None:
    async def play(scene: Scene) -> None:
        scene.say(ended("requeued:crash"), KILLED)
        (first,) = scene.of.last
        assert (first.level, first.subject, first.job) == ("warning", "worker:work:0", 7)
        assert first.text.endswith("restarts in 0.5 s, job 7 requeued")
        scene.say(HEALTHY)
        (second,) = scene.of.last
        assert second.id == first.id
        assert "restarted after" in second.text
        assert scene.changes == 2
        scene.say(HEALTHY)  # nothing crashed since
        assert scene.changes == 2
        scene.say(KILLED)
        assert len(scene.texts) == 2
        assert scene.of.last[1].id > first.id

    on_stage(store, play)
    assert len(store.live.incidents()) == 2


def test_a_worker_that_is_given_up_is_an_error_with_what_to_do(store: Store) -> None:
    async def play(scene: Scene) -> None:
        scene.say(KILLED, WorkerMoved("worker:work:0", 1, "crashed", "failed", reason="it crashed too often"), HEALTHY)
        assert "restarts in" in scene.texts[0]  # the crash itself was not undone by a start long after
        assert scene.texts[1] == "worker:work:0 has failed: it crashed too often"
        assert scene.of.last[1].level == "error"
        assert "ostler restart worker:work:0" in scene.of.last[1].detail

    on_stage(store, play)


def test_repeats_are_one_incident_and_other_codes_are_others(store: Store) -> None:
    async def play(scene: Scene) -> None:
        scene.say(*(ended("failed", job=n, code="VALIDATION") for n in range(1, 51)))
        scene.say(ended("failed", job=99, code="OTHER"), ended("failed", job=100, code="OTHER", task="tag"))
        assert scene.texts == [
            "50 jobs of task cut failed with VALIDATION, the last is job 50",
            "job 99 (cut) failed: OTHER",
            "job 100 (tag) failed: OTHER",
        ]
        assert [i.count for i in scene.of.last] == [50, 1, 1]

    on_stage(store, play)
    assert [row["count"] for row in store.live.incidents()] == [1, 1, 50]


def test_what_happens_again_after_a_while_is_a_new_incident(store: Store, monkeypatch) -> None:
    now = 1_000_000
    monkeypatch.setattr(module, "now_ms", lambda: now)

    async def play(scene: Scene) -> None:
        nonlocal now
        for wait in (0, 59_000, 59_000, 61_000):  # counted from the last one
            now += wait
            scene.say(Backpressure("q", "too much"))
        assert [i.count for i in scene.of.last] == [3, 1]
        assert scene.texts == ["queue q held: too much"] * 2

    on_stage(store, play)


def test_a_pause_is_an_incident_and_one_that_was_there_before_is_none(store: Store) -> None:
    async def play(scene: Scene) -> None:
        assert scene.say(PoolPaused("work", True, still=True), PoolPaused(None, True, still=True)) == []
        said = scene.say(PoolPaused("work", True), PoolPaused("work", False), PoolPaused(None, True))
        assert said == ["pool work paused", "pool work resumed", "all pools paused"]
        assert [i.subject for i in scene.of.last] == ["pool:work", "pool:work", "pool:*"]

    on_stage(store, play)


def test_jobs_that_go_well_or_are_tried_again_are_no_incident(store: Store) -> None:
    async def play(scene: Scene) -> None:
        assert scene.say(ended("done"), ended("requeued:retry", code="ERROR"), ended("cancelled"), HEALTHY) == []
        assert scene.changes == 0

    on_stage(store, play)


def test_the_store_and_dead_nodes_are_told(store: Store) -> None:
    async def play(scene: Scene) -> None:
        said = scene.say(
            Recovered(1, "stale"), Recovered(3, "stale"), StoreAnswers("writer", False), StoreAnswers("writer", True)
        )
        assert said == [
            "1 job of a node that died requeued",
            "3 jobs of a node that died requeued",
            "the store does not answer lane writer; retrying",
            "the store accepts writes of lane writer again",
        ]

    on_stage(store, play)


def test_incidents_survive_the_node_and_ids_never_meet(store: Store, tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        for n in range(KEPT + 20):  # many in one millisecond
            scene.of.tell("info", "node", f"thing {n}")
        assert len(scene.of.last) == KEPT

    on_stage(store, play)
    rows = store.live.incidents(1000)
    assert [row["text"] for row in rows] == [f"thing {n}" for n in reversed(range(KEPT + 20))]
    assert [row["text"] for row in store.live.incidents(2, before=rows[10]["id"])] == ["thing 58", "thing 57"]

    async def later(scene: Scene) -> None:
        scene.of.tell("info", "node", "said before the store was read")
        await scene.of.start()
        assert scene.texts[-2:] == [f"thing {KEPT + 19}", "said before the store was read"]
        assert len(scene.texts) == KEPT

    on_stage(store, later)


def test_codes_that_are_made_up_do_not_fill_the_memory(store: Store) -> None:
    async def play(scene: Scene) -> None:
        scene.say(*(ended("failed", job=n, code=f"CODE{n}") for n in range(1000)))
        assert len(scene.of._repeats) <= 200
        assert len(scene.of.last) == KEPT

    on_stage(store, play)


def test_old_incidents_are_purged(store: Store) -> None:
    for at in (1000, 2000):
        store.live.put_incident(
            {
                "node": "n",
                "id": at,
                "level": "info",
                "subject": "s",
                "text": "t",
                "count": 1,
                "at": at,
                "job": None,
                "detail": None,
            }
        )
    store.live.purge(10_000, incidents_before=1500)
    assert [row["id"] for row in store.live.incidents()] == [2000]
