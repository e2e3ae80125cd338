"""Lanes: the loop never waits for a disk, and a busy store delays but loses nothing."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from ostler.errors import StoreBusy, StoreDoubt, StoreGone
from ostler.store import Store, lanes
from ostler.store.lanes import Lane
from ostler.store.rows import NewJob
from tests.stores import locked


def run(work) -> None:
    asyncio.run(work())


def test_a_locked_store_delays_a_write_until_it_goes_through(tmp_path: Path, store_url: str) -> None:
    async def main() -> None:
        lane = Lane("t", lambda: Store.open(store_url, tmp_path, busy_timeout=0.01), asyncio.get_running_loop())
        await lane.start()
        await lane.call(lambda s: None)
        with Store.open(store_url, tmp_path) as blocker:
            with locked(blocker):
                write = asyncio.create_task(lane.call(lambda s: s.jobs.enqueue([NewJob("t", "q", "{}")], 1)))
                while lane.trouble_since is None:
                    await asyncio.sleep(0.005)
                assert not write.done()
            assert await write == [1]
        assert lane.trouble_since is None
        await lane.stop()

    run(main)


def test_patience_ends_and_then_nothing_is_stored(tmp_path: Path, store_url: str) -> None:
    async def main() -> None:
        lane = Lane("t", lambda: Store.open(store_url, tmp_path, busy_timeout=0.01), asyncio.get_running_loop())
        await lane.start()
        await lane.call(lambda s: None)
        with Store.open(store_url, tmp_path) as blocker:
            with locked(blocker):
                with pytest.raises(StoreBusy):
                    await lane.call(lambda s: s.jobs.enqueue([NewJob("t", "q", "{}")], 1), patience=0.1)
            assert blocker.jobs.list() == ([], None)
        await lane.stop()

    run(main)


def test_one_bad_piece_of_work_does_not_end_the_lane(tmp_path: Path, store_url: str) -> None:
    async def main() -> None:
        lane = Lane("t", lambda: Store.open(store_url, tmp_path), asyncio.get_running_loop())
        await lane.start()
        with pytest.raises(ZeroDivisionError):
            await lane.call(lambda s: 1 // 0)
        lane.post(lambda s: 1 // 0)
        assert await lane.call(lambda s: "still here") == "still here"
        await lane.stop()

    run(main)


def test_work_runs_in_order_and_close_waits_for_it(tmp_path: Path, store_url: str) -> None:
    async def main() -> list[int]:
        lane = Lane("t", lambda: Store.open(store_url, tmp_path), asyncio.get_running_loop())
        await lane.start()
        seen: list[int] = []
        for n in range(50):
            lane.post(lambda s, n=n: seen.append(n))
        await lane.stop()
        return seen

    assert asyncio.run(main()) == list(range(50))


def test_patience_counts_from_the_call_also_behind_work_that_tries_for_ever(tmp_path: Path, store_url: str) -> None:
    async def main() -> None:
        lane = Lane(
            "t", lambda: Store.open(store_url, tmp_path, busy_timeout=0.01), asyncio.get_running_loop(), patience=0.2
        )
        await lane.start()
        await lane.call(lambda s: None)
        with Store.open(store_url, tmp_path) as blocker:
            with locked(blocker):
                lane.post(lambda s: s.jobs.enqueue([NewJob("endless", "q", "{}")], 1))
                with pytest.raises(StoreBusy, match="not answered within 0.2 s.*nothing was stored"):
                    await lane.call(lambda s: s.jobs.enqueue([NewJob("bounded", "q", "{}")], 1))
            await lane.call(lambda s: None, patience=30.0)
            assert [job["task"] for job in blocker.jobs.list()[0]] == ["endless"]
        await lane.stop()

    run(main)


def test_work_that_has_begun_is_waited_for_because_it_may_be_stored(tmp_path: Path, store_url: str) -> None:
    async def main() -> None:
        lane = Lane("t", lambda: Store.open(store_url, tmp_path), asyncio.get_running_loop())
        await lane.start()
        begun, go = threading.Event(), threading.Event()
        slow = asyncio.create_task(lane.call(lambda s: (begun.set(), go.wait(30), "stored")[2], patience=0.05))
        behind = asyncio.create_task(lane.call(lambda s: "never", patience=0.05))
        await asyncio.to_thread(begun.wait, 30)
        with pytest.raises(StoreBusy, match="other work was before it"):
            await behind
        assert not slow.done()
        go.set()
        assert await slow == "stored"
        await lane.stop()

    run(main)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_database_file_that_is_deleted_or_replaced_is_noticed(tmp_path: Path, replaced: bool) -> None:
    async def main() -> None:
        told: list[bool] = []
        lane = Lane(
            "t", lambda: Store.open("", tmp_path), asyncio.get_running_loop(), lambda _, well: told.append(well), 30.0
        )
        await lane.start()
        await lane.call(lambda s: s.jobs.enqueue([NewJob("t", "q", "{}")], 1))
        path, aside = tmp_path / "ostler.db", tmp_path / "aside.db"
        path.rename(aside)
        if replaced:
            path.touch()
        with pytest.raises(StoreGone, match="replaced" if replaced else "was deleted"):
            await lane.call(lambda s: s.jobs.enqueue([NewJob("t", "q", "{}")], 1))
        assert lane.trouble_since is not None
        assert "while it was in use" in lane.trouble
        aside.rename(path)
        assert await lane.call(lambda s: len(s.jobs.list()[0])) == 1
        assert lane.trouble_since is None
        await lane.stop()
        assert told == [False, True]

    run(main)


@pytest.mark.parametrize(("how", "tries"), [({"patience": 5.0}, 1), ({"patience": 5.0, "known": True}, 2), ({}, 2)])
def test_a_commit_in_doubt_is_repeated_only_where_the_store_knows_the_work_again(
    tmp_path: Path, how: dict, tries: int
) -> None:
    async def main() -> None:
        lane = Lane("t", lambda: Store.open("", tmp_path), asyncio.get_running_loop())
        await lane.start()
        tried = []

        def work(store: Store) -> str:
            tried.append(store)
            if len(tried) == 1:
                raise StoreDoubt("lost")
            return "stored"

        if tries == 1:
            with pytest.raises(StoreDoubt):
                await lane.call(work, **how)
        else:
            assert await lane.call(work, **how) == "stored"
        assert len(tried) == tries
        assert lane.trouble_since is None
        await lane.stop()

    run(main)


def test_a_store_that_took_work_and_says_nothing_is_seen(
    tmp_path: Path, store_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a process of the server hangs: no error comes, and the results of jobs wait behind it."""
    monkeypatch.setattr(lanes, "_SILENT", 0.05)

    async def main() -> None:
        lane = Lane("t", lambda: Store.open(store_url, tmp_path), asyncio.get_running_loop())
        await lane.start()
        await lane.call(lambda s: None)
        answered = threading.Event()
        work = asyncio.create_task(lane.call(lambda s: answered.wait(60)))
        while lane.trouble_since is None:
            await asyncio.sleep(0.005)
        assert not work.done()
        answered.set()
        await work
        while lane.trouble_since is not None:
            await asyncio.sleep(0.005)
        await lane.stop()

    run(main)
