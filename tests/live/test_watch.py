"""The watch, with a store in this thread: what the broker holds is what the store says, whatever was heard of it."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from ostler.config import Settings
from ostler.errors import StoreBusy
from ostler.events import Bus, JobsTouched
from ostler.live import queues, topics
from ostler.live.broker import Broker
from ostler.live.incidents import Incidents
from ostler.live.jobs import FOLLOWED
from ostler.live.watch import Watch
from ostler.store import Store
from ostler.store.rows import Finish, NewJob, Turn
from tests.live.test_broker import read


class Scene:
    """A watch on a store, with no workers."""

    def __init__(self, store: Store) -> None:
        self.store, self.bus, self.broker = store, Bus(), Broker("e1", "n1")
        self.busy = False
        supervisor = SimpleNamespace(
            pools={},
            slots={},
            pauses=SimpleNamespace(enabled=True, holds=lambda _: False),
            stopping=False,
            node="n1",
            member=SimpleNamespace(id="n1@1", unheard=lambda: None, lost=False),
            records=SimpleNamespace(degraded=False),
        )
        dispatcher = SimpleNamespace(limits={}, pressure=SimpleNamespace(reasons=lambda now: {}))
        incidents = Incidents("n1", self.bus, self)
        poll = SimpleNamespace(stranded=[], unrunnable=Counter(), nodes=1)
        self.watch = Watch(Settings(), self.broker, self.bus, supervisor, dispatcher, poll, self, [], incidents, ["q"])

    async def call(self, work, *, patience=None):
        if self.busy:
            raise StoreBusy("locked")
        return work(self.store)

    # ---- what the dispatcher does

    def put(self, count: int = 1, *, tell: bool = True) -> list[int]:
        ids = self.store.jobs.enqueue([NewJob("t", "q", "{}")] * count, 1000)
        if tell:
            self.bus.send(JobsTouched((), others=True))
        return ids

    def claim(self, count: int = 1, *, tell: bool = True) -> list:
        claims = self.store.turns.take(Turn("n1", 2000, wants={"q": ["worker:q:0"] * count})).claims
        if tell:
            self.bus.send(JobsTouched([c.id for c in claims]))
        return claims

    def finish(self, *claims, tell: bool = True) -> None:
        done = [Finish(c.id, c.fence, "done", 2000, 2050, "done") for c in claims]
        self.store.turns.take(Turn("n1", 2100, finishes=done))
        if tell:
            self.bus.send(JobsTouched([c.id for c in claims]))

    # ---- what a client sees

    async def follow(self, text: str = "queue:jobs"):
        return await self.watch.follow(topics.parse(text), None)

    async def snapshot(self) -> dict[int, str]:
        client = await self.follow()
        found = {e["job"]["id"]: e["job"]["status"] for e in read(client.take()) if "job" in e}
        self.broker.leave(client)
        return found

    async def look(self) -> None:
        if self.watch._dirty.is_set():
            await self.watch._look()


def on_stage(store: Store, play) -> None:
    async def main() -> None:
        scene = Scene(store)
        await play(scene)

    asyncio.run(main())


def test_a_turn_of_more_jobs_than_are_looked_at_leaves_none_behind(store: Store) -> None:
    async def play(scene: Scene) -> None:
        client = await scene.follow()
        scene.put(250)
        claims = scene.claim(250)
        await scene.look()
        client.take()
        assert "processing" in (await scene.snapshot()).values()
        scene.finish(*reversed(claims))  # 250 are named, of which 100 are noted, and not those that are shown
        await scene.look()
        assert set((await scene.snapshot()).values()) == {"done"}
        said = read(client.take())
        assert [e["type"] for e in said].count("resync") == 1
        assert len(scene.watch._jobs._followed) <= FOLLOWED

    on_stage(store, play)


def test_a_flood_is_forgotten_but_what_still_runs_is_not(store: Store) -> None:
    async def play(scene: Scene) -> None:
        await scene.follow()
        scene.put(1003)
        running = scene.claim(3)
        await scene.look()
        for _ in range(10):
            scene.finish(*scene.claim(100))
            await scene.look()
        found = await scene.snapshot()
        assert [j for j, status in found.items() if status == "processing"] == [c.id for c in running]
        assert len(found) <= FOLLOWED
        scene.finish(*running)
        await scene.look()
        assert set((await scene.snapshot()).values()) == {"done"}
        assert len(scene.broker._entries) < FOLLOWED + 10

    on_stage(store, play)


def test_one_that_ends_behind_a_long_backlog_is_told_and_no_resync(store: Store) -> None:
    async def play(scene: Scene) -> None:
        client = await scene.follow()
        for _ in range(8):  # more than are followed, none of which runs
            scene.put(50)
            await scene.look()
            client.take()
        for _ in range(5):
            (claim,) = scene.claim(1)
            scene.finish(claim)
            await scene.look()
            said = read(client.take())
            assert [(e["type"], e["job"]["id"], e["job"]["status"]) for e in said] == [("job_update", claim.id, "done")]

    on_stage(store, play)


def test_what_others_wrote_is_found_by_the_ring_and_the_poll(store: Store) -> None:
    async def play(scene: Scene) -> None:
        await scene.follow()
        first, second = scene.put(2)
        await scene.look()
        store.jobs.cancel(first, 3000)
        scene.bus.send(JobsTouched((), others=True))
        await scene.look()
        assert await scene.snapshot() == {first: "cancelled", second: "queued"}
        store.jobs.retry(first, 4000)
        scene.bus.send(JobsTouched((first,), others=True))
        await scene.look()
        assert await scene.snapshot() == {first: "queued", second: "queued"}

    on_stage(store, play)


def test_what_changed_while_nobody_followed_is_read_again(store: Store) -> None:
    async def play(scene: Scene) -> None:
        scene.put(2)
        one, two = scene.claim(2)
        assert set((await scene.snapshot()).values()) == {"processing"}
        scene.finish(one)
        store.jobs.cancel_many(3000, 10, ids=[two.id])
        assert await scene.snapshot() == {one.id: "done", two.id: "processing"}
        store.jobs.retry(one.id, 4000)  # an end that is none any more
        assert (await scene.snapshot())[one.id] == "queued"

    on_stage(store, play)


def test_what_changed_while_only_other_topics_were_followed_is_read_again(store: Store) -> None:
    async def play(scene: Scene) -> None:
        other = await scene.follow("queue:*:status")
        scene.put()
        (claim,) = scene.claim()
        await scene.look()
        assert await scene.snapshot() == {claim.id: "processing"}
        scene.finish(claim)
        await scene.look()
        scene.put(150)
        scene.finish(*scene.claim(150))
        await scene.look()
        assert (await scene.snapshot()).get(claim.id) in (None, "done")
        scene.broker.leave(other)

    on_stage(store, play)


def test_an_error_that_is_no_text_does_not_end_the_live_state(store: Store) -> None:
    async def play(scene: Scene) -> None:
        scene.put()
        (claim,) = scene.claim()
        error = json.dumps({"code": "A\ud800", "message": "no such file: \udcff"})
        failed = Finish(claim.id, claim.fence, "failed", 2000, 2050, "failed", error=error)
        store.turns.take(Turn("n1", 2100, finishes=[failed]))
        assert await scene.snapshot() == {claim.id: "failed"}

    on_stage(store, play)


def test_deleted_jobs_are_not_shown(store: Store) -> None:
    async def play(scene: Scene) -> None:
        scene.put(3)
        claims = scene.claim(3)
        scene.finish(*claims[:2])
        assert len(await scene.snapshot()) == 3
        assert sorted(store.jobs.retention.purge(done_before=9000, failed_before=9000).jobs) == [
            c.id for c in claims[:2]
        ]
        assert await scene.snapshot() == {claims[2].id: "processing"}
        assert len(scene.watch._jobs._followed) == 1

    on_stage(store, play)


def test_a_store_that_does_not_answer_loses_no_change(store: Store) -> None:
    async def play(scene: Scene) -> None:
        client = await scene.follow()
        scene.put(151)
        (ended,) = scene.claim()
        scene.finish(ended)
        await scene.look()
        claims = scene.claim(150)
        scene.busy = True
        await scene.look()
        scene.finish(*claims)
        store.jobs.retry(ended.id, 3000)
        scene.bus.send(JobsTouched([ended.id]))
        await scene.look()
        client.take()
        scene.busy = False
        assert scene.watch._store_dirty  # the poll looks again for this
        await scene.watch._look()
        found = await scene.snapshot()
        assert found.pop(ended.id) == "queued"
        assert set(found.values()) == {"done"}
        assert any(e["type"] == "resync" for e in read(client.take()))

    on_stage(store, play)


def test_nobody_follows_and_nothing_is_read(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(scene: Scene) -> None:
        scene.put(5)
        scene.claim(5)
        assert not scene.watch._dirty.is_set()
        assert scene.watch._jobs._named == {}
        assert scene.broker.seq == 0

    on_stage(store, play)


def test_a_little_more_or_less_memory_is_no_news(store: Store) -> None:
    async def play(scene: Scene) -> None:
        slot = SimpleNamespace(component="worker:q:0", worker=SimpleNamespace(rss_mb=100.0))
        shown = []
        for now in (100.0, 103.0, 98.0, 104.9, 106.0, 102.0, 100.0):
            slot.worker.rss_mb = now
            shown.append(scene.watch._workers._memory(slot))
        assert shown == [100.0, 100.0, 100.0, 100.0, 106.0, 106.0, 100.0]
        slot.worker = None
        assert scene.watch._workers._memory(slot) is None
        assert scene.watch._workers.memory == {}

    on_stage(store, play)


def test_the_clock_alone_makes_no_news(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(scene: Scene) -> None:
        monkeypatch.setattr(queues, "now_ms", lambda: 5000)
        store.live.tallies.add({("q", "done"): 1, ("q", "run_ms"): 9_000_000}, -36_000_000)  # once it took longer
        await scene.follow("*")
        scene.put()
        scene.finish(*scene.claim())
        scene.put()
        scene.claim()  # it runs on
        await scene.look()
        seq = scene.broker.seq
        monkeypatch.setattr(
            queues, "now_ms", lambda: 7_200_000
        )  # its time goes by, and the last hour's average with it
        scene.watch._store_dirty = scene.watch._jobs.everything = True
        await scene.watch._look()
        assert scene.broker.seq == seq

    on_stage(store, play)


def test_a_job_whose_id_was_given_earlier_and_committed_later_is_told(database: str, tmp_path: Path) -> None:
    """On PostgreSQL ids are given in order and committed in any: a caller's own transaction may take a while."""

    async def play(scene: Scene) -> None:
        with Store.open(database, tmp_path) as slow:
            client = await scene.follow()
            with slow.db.transaction():
                (late,) = slow.db.insert("enqueue", [(*NewJob("t", "q", "{}"), 1000)])
                (early,) = scene.put()
                assert early > late
                await scene.look()
                assert {e["job"]["id"] for e in read(client.take()) if "job" in e} == {early}
            scene.bus.send(JobsTouched((), others=True))
            await scene.look()
            assert late in {e["job"]["id"] for e in read(client.take()) if "job" in e}

    with Store.open(database, tmp_path) as opened:
        on_stage(opened, play)
