"""The node's side of sessions, with a plane, workers and a registry that a test plays: what they say at odd moments."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ostler.calls.tenants import PlaneTenant
from ostler.events import Bus
from ostler.lifecycle.state import Status
from ostler.sessions import held, pools, turns
from ostler.sessions.pools import SessionPools
from ostler.sessions.registry import Admission, Ended, Verdict, WorkerKey
from ostler.sessions.spec import declare_program
from ostler.sessions.tenant import Sessions
from tests.sessions.planes import until


class Registry:
    """Admits all, at once unless it `is_away`."""

    def __init__(self) -> None:
        self.rung: Callable[[], None] = lambda: None
        self.ended: list[Ended] = []
        self.admitted: list[str] = []
        self.turns: list[tuple[list[str], list[str]]] = []  # (ended, admitted)
        self.left: list[tuple[str, list[str]]] = []  # (worker, whose ends were told before)
        self.there = asyncio.Event()
        self.there.set()

    async def turn(self, ended: list[Ended], wanted: list[Admission]) -> list[Verdict]:
        await self.there.wait()
        self.ended += ended
        self.admitted += [about.id for about in wanted]
        self.turns.append(([one.id for one in ended], [about.id for about in wanted]))
        return [Verdict(ok=True) for _ in wanted]

    async def leave(self, worker: WorkerKey, reason: str, text: str) -> None:
        self.left.append((worker.component, [one.id for one in self.ended]))

    async def nothing(self, *_: object) -> dict[Any, Any]:
        return {}

    start = stop = announce = beat = nothing


class Stage:
    """Two workers of one pool."""

    def __init__(self) -> None:
        spec = declare_program("echo", ["serve", "{socket}"], None, {"lifetime": 0, "slots": 2})
        self.registry = Registry()
        self.pools = SessionPools({"echo": spec}, self.registry, Bus(), beat=60.0)  # type: ignore[arg-type]
        self.tenant = Sessions(self.pools)
        self.said: list[list[Any]] = []
        self.killed: list[str] = []
        loop = asyncio.get_running_loop()
        self.pools.supervisor = SimpleNamespace(  # type: ignore[assignment]
            pauses=SimpleNamespace(holds=lambda _: False),
            wake=lambda: None,
            began=lambda worker: None,
            finished=lambda *_, **__: None,
            kill=lambda worker, reason: self.killed.append(reason),
            spawn_task=lambda work, _: loop.create_task(work),
        )
        self.pools.plane_is_up(lambda _, *frame: self.said.append([*frame]))
        self.workers = [self._worker(n) for n in range(2)]

    def _worker(self, number: int) -> Any:
        pool = SimpleNamespace(spec=SimpleNamespace(name="echo"))
        about = {"leave": False, "killing": None, "status": Status.HEALTHY, "ended": None, "served": 0}
        info = {"address": "tcp:1", "opens": True}
        name = f"worker:echo:{number}"
        worker: Any = SimpleNamespace(
            component=name, generation=1, pool=pool, info=info, send=lambda *_: None, rss_mb=0.0, **about
        )
        self.tenant.ready(worker, worker.info)
        return worker

    def admit(self, session: str, number: int = 0) -> None:
        self.pools.heard(["admit", session, f"worker:echo:{number}", 1, {"owner": "token"}])

    async def begun(self, *sessions: str) -> None:
        """These are live."""
        for session in sessions:
            self.admit(session)
            self.tenant.heard(self.workers[0], ["opened", session, {}])
        await until(lambda: {*sessions} <= {*self.registry.admitted}, "their rows")

    def over(self, session: str) -> None:
        self.pools.heard(["ended", session, "client", {}])

    def of(self, verb: str) -> list[list[Any]]:
        return [frame[1:] for frame in self.said if frame[0] == verb]


def staged(test: Callable[[Stage], Awaitable[None]]) -> None:
    async def main() -> None:
        stage = Stage()
        await stage.pools.start()
        try:
            await test(stage)
        finally:
            stage.registry.there.set()
            await stage.pools.stop()

    asyncio.run(main())


def test_a_worker_speaks_of_its_own_sessions_alone() -> None:
    async def test(stage: Stage) -> None:
        stage.admit("s1", 0)
        await until(lambda: stage.registry.admitted, "its row")
        theirs = stage.workers[1]
        before = len(stage.said)
        for frame in (
            ["opened", "s1", {"address": "tcp:666"}],
            ["unopened", "s1", "no"],
            ["ended", "s1", "no"],
            ["began", "s1"],
            ["over", "s1", "client", {}],
        ):
            stage.tenant.heard(theirs, frame)
        stage.tenant.beat(theirs, {"door": {"s1": [1, 1, 1]}})
        assert stage.said[before:] == []
        assert stage.pools.held["s1"].bytes_in == 0
        stage.tenant.heard(stage.workers[0], ["opened", "s1", {"address": "tcp:2"}])
        assert stage.of("admitted") == [["s1", {"address": "tcp:2"}]]

    staged(test)


def test_what_a_worker_says_fits_into_a_close_frame_and_a_row() -> None:
    async def test(stage: Stage) -> None:
        odd, worker = "\ud800" + "x" * 1_000_000, stage.workers[0]
        stage.admit("s1")
        sums = {"text": odd, "code": 10**9, "bytes_in": 10**40, "bytes_out": "many"}
        stage.tenant.heard(worker, ["over", "s1", odd, sums])
        ((_, reason, told),) = stage.of("over")
        assert reason == "?" + "x" * 499
        assert told == {"text": reason, "code": 0, "bytes_in": 2**62, "bytes_out": 0}
        stage.tenant.heard(worker, ["ended", "s1", odd])
        stage.tenant.heard(worker, ["lost", odd])
        assert [frame[-1] for frame in stage.said[-2:]] == [f"ostler: {reason}"] * 2
        assert stage.killed == ["lost"]

    staged(test)


def test_a_worker_that_has_opened_a_session_is_not_blamed_for_a_slow_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_OPENS", 0.05)

    async def test(stage: Stage) -> None:
        stage.registry.there.clear()
        stage.admit("s1")
        stage.admit("s2")
        stage.tenant.heard(stage.workers[0], ["opened", "s1", {}])
        await until(lambda: stage.of("refused"), "the other one to be refused")
        assert [id_ for id_, *_ in stage.of("refused")] == ["s2"]
        stage.registry.there.set()
        await until(lambda: stage.of("admitted"), "it to be admitted")
        await until(lambda: stage.registry.ended, "the row of the other one to be ended")
        assert [(one.id, one.reason) for one in stage.registry.ended] == [("s2", "refused")]

    staged(test)


def test_an_admission_does_not_wait_for_ends_and_ends_are_written_together_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "_GATHER", 0.5)

    async def test(stage: Stage) -> None:
        await stage.begun("s1")
        stage.over("s1")
        await stage.begun("s2")
        assert stage.registry.turns == [([], ["s1"]), ([], ["s2"])]
        stage.over("s2")
        await until(lambda: stage.registry.ended, "the ends")
        assert stage.registry.turns[2:] == [(["s1", "s2"], [])]

    staged(test)


def test_an_admission_that_needs_the_room_of_sessions_that_have_ended_takes_their_ends_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "_GATHER", 60.0)

    async def test(stage: Stage) -> None:
        await stage.begun("s1", "s2")
        stage.over("s1")
        await stage.begun("s3")  # the registry still counts s1 and s2, and there are two slots
        assert stage.registry.turns[-1] == (["s1"], ["s3"])

    staged(test)


def test_a_session_that_ended_just_before_its_worker_left_keeps_its_own_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "_GATHER", 60.0)

    async def test(stage: Stage) -> None:
        await stage.begun("s1")
        stage.over("s1")
        stage.pools.unregister(stage.pools.of(stage.workers[0]))  # type: ignore[arg-type]
        await until(lambda: stage.registry.left, "the worker to leave")
        assert stage.registry.left == [("worker:echo:0", ["s1"])]

    staged(test)


def test_a_worker_is_told_of_sessions_for_its_views_after_the_client_is_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held, "_NOTED", 0.5)

    async def test(stage: Stage) -> None:
        told: list[object] = []
        worker = stage.workers[0]
        worker.send, serving = (lambda *frame: told.append(frame[:2])), stage.pools.of(worker)
        assert serving is not None
        serving.info.update(opens=False, views="/socket")
        stage.admit("s1")
        await until(lambda: stage.of("admitted"), "the client to be connected")
        stage.over("s1")
        assert not told
        await until(lambda: told, "the worker to be told")
        assert told == [("open", "s1"), ("close", "s1")]

    staged(test)


def test_a_plane_hears_of_the_pools_before_the_catalog_with_which_it_begins_to_serve() -> None:
    said: list[str] = []
    worker: Any = SimpleNamespace(send=lambda *frame: said.append(frame[0]))
    gateway: Any = SimpleNamespace(plane_is_up=lambda worker: worker.send("catalog", {}))
    sessions: Any = SimpleNamespace(plane_is_up=lambda send: send("sessions", "pools", {}))
    PlaneTenant(gateway, {"sessions": sessions}).ready(worker, {})
    assert said == ["sessions", "catalog"], "else its first clients are told 400: there is no such pool"
