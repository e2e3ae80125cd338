"""The registry of sessions: what holds for the store, on both databases, and for Redis or Valkey."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from ostler.sessions.registry import Verdict, WorkerKey
from ostler.store import Store
from ostler.store.nodes import NodeRow
from ostler.store.sessions import Lost
from tests.sessions.registries import (
    WORKER,
    YES,
    Backend,
    StoreBackend,
    asks,
    backend,
    beat,
    given_up,
    in_use,
    no,
    on_a_loop,
    over,
    redis,
    server,
    shared_database,
    stored,
    worker,
)

from tests.stores import value

assert backend and redis and server and shared_database and stored  # fixtures


# ---- admission


@on_a_loop
async def test_a_worker_takes_as_many_sessions_as_it_has_slots_in_the_order_in_which_they_asked(
    backend: Backend,
) -> None:
    registry = await backend.node()
    await registry.announce(worker(slots=3))
    verdicts = await registry.turn([], [asks(f"s{n}") for n in range(5)])
    assert verdicts == [YES, YES, YES, no("full"), no("full")]
    assert await registry.turn([], [asks("s9")]) == [no("full")]
    assert await in_use(registry) == {WORKER: (3, 3)}
    assert sorted(row["id"] for row in await registry.live()) == ["s0", "s1", "s2"]


@on_a_loop
async def test_a_turn_releases_before_it_admits(backend: Backend) -> None:
    registry = await backend.node()
    await registry.announce(worker(slots=1))
    assert await registry.turn([], [asks("a")]) == [YES]
    assert await registry.turn([over("a")], [asks("b"), asks("c")]) == [YES, no("full")]
    assert await in_use(registry) == {WORKER: (1, 2)}
    assert await backend.history() == {"a": "client"}


@on_a_loop
async def test_no_session_is_admitted_beyond_the_lifetime_of_a_worker(backend: Backend) -> None:
    registry = await backend.node()
    await registry.announce(worker(slots=2, lifetime=3))
    assert await registry.turn([], [asks("a"), asks("b")]) == [YES, YES]
    assert await registry.turn([over("a"), over("b")], [asks("c"), asks("d")]) == [YES, no("lifetime")]
    assert await registry.turn([over("c")], [asks("e")]) == [no("lifetime")]
    assert await in_use(registry) == {WORKER: (0, 3)}
    await registry.announce(worker("worker:chromium:1", lifetime=0))
    endless = WorkerKey("worker:chromium:1", 1)
    for n in range(60):
        assert await registry.turn([over(f"n{n - 1}")], [asks(f"n{n}", endless)]) == [YES]


@on_a_loop
async def test_a_session_that_asks_twice_is_admitted_once_and_what_ends_twice_ended_the_first_time(
    backend: Backend,
) -> None:
    registry = await backend.node()
    await registry.announce(worker(slots=2))
    await registry.announce(worker("worker:chromium:1"))
    assert await registry.turn([], [asks("a")]) == [YES]
    assert await registry.turn([], [asks("a"), asks("b")]) == [YES, YES]
    assert await registry.turn([], [asks("a", WorkerKey("worker:chromium:1", 1))]) == [no("taken")]
    assert await in_use(registry) == {WORKER: (2, 2), WorkerKey("worker:chromium:1", 1): (0, 0)}
    await registry.turn([over("a", "idle")], [])
    await registry.turn([over("a", "client"), over("nobody")], [])
    assert await in_use(registry) == {WORKER: (1, 2), WorkerKey("worker:chromium:1", 1): (0, 0)}
    assert await backend.history() == {"a": "idle"}


@on_a_loop
async def test_workers_that_are_unknown_or_drain_admit_none(backend: Backend) -> None:
    registry = await backend.node()
    assert await registry.turn([], [asks("a")]) == [no("unknown")]
    await registry.announce(worker())
    await registry.announce(worker())  # the same once more
    assert await registry.turn([], [asks("a", WorkerKey(WORKER.component, 2)), asks("b")]) == [no("unknown"), YES]
    await registry.beat([beat("b", status="draining", served=1)])
    assert await registry.turn([], [asks("c")]) == [no("draining")]
    assert await in_use(registry) == {WORKER: (1, 1)}
    assert [one.status for one in await registry.workers()] == ["draining"]


@on_a_loop
async def test_many_at_once_never_get_more_than_there_is(backend: Backend) -> None:
    registry = await backend.node()
    await registry.announce(worker(slots=7, lifetime=20))
    found = await asyncio.gather(*(registry.turn([], [asks(f"s{n}")]) for n in range(40)))
    assert sum(verdict.ok for (verdict,) in found) == 7
    live = [row["id"] for row in await registry.live()]
    assert len(live) == 7
    found = await asyncio.gather(
        *(registry.turn([over(id)], [asks(f"{id}-{n}") for n in range(3)]) for id in live),
        *(registry.turn([], [asks(f"t{n}")]) for n in range(20)),
    )
    assert await in_use(registry) == {WORKER: (7, 14)}


# ---- the life of a worker


@on_a_loop
async def test_a_worker_that_leaves_ends_its_sessions_with_the_reason_and_leaves_others_alone(backend: Backend) -> None:
    registry = await backend.node()
    other = WorkerKey("worker:chromium:1", 4)
    await registry.announce(worker())
    await registry.announce(worker(*other))
    assert await registry.turn([], [asks("a"), asks("b"), asks("c", other)]) == [YES, YES, YES]
    await registry.leave(WORKER, "worker-lost", "the worker died (SIGKILL)")
    await registry.leave(WORKER, "worker-lost", "the worker died (SIGKILL)")
    assert await backend.history() == {"a": "worker-lost", "b": "worker-lost"}
    assert await in_use(registry) == {other: (1, 1)}
    assert await registry.turn([over("a")], [asks("d")]) == [no("unknown")]


@on_a_loop
async def test_all_nodes_see_the_workers_of_all_living_nodes(backend: Backend) -> None:
    a, b = await backend.node("a"), await backend.node("b")
    await a.announce(worker(slots=5, versions=("1.65", "1.58")))
    await b.announce(worker(pool="browsers", slots=2, lifetime=3, served=2))
    assert await a.turn([], [asks("x"), asks("y")]) == [YES, YES]
    one, two = await b.workers()
    assert one[:10] == ("a@1", "a", "http://a:8356", "chromium", "chromium", *WORKER, "chromium-0.sock", 5, 50)
    assert (one.served, one.in_use, one.status, one.wanted, one.versions, one.free) == (
        2,
        2,
        "available",
        "serve",
        ("1.65", "1.58"),
        3,
    )
    assert (two.node, two.pool, two.serves, two.free) == ("b@1", "browsers", "chromium", 1)
    assert await b.turn([], [asks("z"), asks("w")]) == [YES, no("lifetime")]


# ---- heartbeats


@on_a_loop
async def test_a_heartbeat_says_what_is_wanted_and_a_wanted_drain_admits_none_at_once(backend: Backend) -> None:
    a, b = await backend.node("a"), await backend.node("b")
    await a.announce(worker())
    assert await a.turn([], [asks("x")]) == [YES]
    assert await a.beat([beat("x", served=1)]) == {WORKER: "serve"}
    (found,) = await b.workers()
    assert await b.want(found, "drain")
    assert await a.turn([], [asks("y")]) == [no("draining")]
    for _ in range(2):
        assert await a.beat([beat("x", served=1)]) == {WORKER: "drain"}
    assert await b.want(found, "serve")
    assert await a.beat([beat("x", served=1)]) == {WORKER: "serve"}
    assert await a.turn([], [asks("y")]) == [YES]
    await a.leave(WORKER, "drained", "")
    await backend.settled()
    assert not await b.want(found, "drain")


@on_a_loop
async def test_a_heartbeat_brings_bytes_and_the_count_of_sessions(backend: Backend) -> None:
    registry = await backend.node()
    await registry.announce(worker())
    assert await registry.turn([], [asks("x", priority=3, client="10.0.0.9", agent="Playwright/1.65", key="mine")]) == [
        YES
    ]
    await registry.beat([beat(served=4)._replace(live={"x": (10, 2**40)})])
    (row,) = await registry.live()
    assert (row["bytes_in"], row["bytes_out"]) == (10, 2**40)
    assert [row[name] for name in ("pool", "serves", "node", "component", "generation", "owner")] == [
        "chromium", "chromium", "a@1", *WORKER, "token:ci",
    ]  # fmt: skip
    assert (row["priority"], row["client"], row["agent"], row["key"], row["via"]) == (
        3,
        "10.0.0.9",
        "Playwright/1.65",
        "mine",
        None,
    )
    assert (row["ended_at"], row["reason"]) == (None, None)
    assert await in_use(registry) == {WORKER: (1, 4)}
    await registry.turn([over("x", "killed", text="by an operator", code=1008, bytes_in=11, bytes_out=2**40)], [])
    await backend.settled()
    row = backend.store.sessions.find("x")
    assert row is not None and row["started_at"] <= row["ended_at"]
    found = [row[name] for name in ("reason", "text", "code", "bytes_in", "bytes_out", "key", "agent")]
    assert found == ["killed", "by an operator", 1008, 11, 2**40, "mine", "Playwright/1.65"]


# ---- ends of nodes


@on_a_loop
async def test_a_sweep_ends_what_a_dead_node_has_left_once_and_touches_no_other(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = await backend.node("a"), await backend.node("b")
    await a.announce(worker())
    await b.announce(worker())
    assert await a.turn([], [asks("x"), asks("y")]) == [YES, YES]
    assert await b.turn([], [asks("z")]) == [YES]
    assert await b.sweep() == []
    await backend.die("a", a)
    (swept,) = await b.sweep()
    assert (swept.node, swept.pool, sorted(swept.sessions)) == ("a@1", "chromium", ["x", "y"])
    assert "reaped stale worker" in caplog.text and swept.worker in caplog.text
    assert await b.sweep() == []
    assert await backend.history() == {"x": "node-lost", "y": "node-lost"}
    assert [(one.node, one.in_use) for one in await b.workers()] == [("b@1", 1)]


# ---- orders


@on_a_loop
async def test_any_node_can_have_a_session_ended_by_the_node_that_has_it(backend: Backend) -> None:
    a, b = await backend.node("a"), await backend.node("b")
    await a.announce(worker())
    assert await a.turn([], [asks("x"), asks("y")]) == [YES, YES]
    assert not await b.end("nobody")
    assert await b.end("x")
    assert await a.orders() == ["x"]
    assert await b.orders() == []
    await a.turn([over("x", "killed")], [])
    assert await a.orders() == []
    assert not await b.end("x")


# ---- trouble


@on_a_loop
async def test_an_end_that_could_not_be_told_is_told_with_the_next_turn(backend: Backend) -> None:
    registry = await backend.node()
    await registry.announce(worker(slots=1))
    assert await registry.turn([], [asks("a")]) == [YES]
    await given_up(registry.turn([over("a")], []))
    assert await registry.turn([], [asks("b")]) == [YES]
    assert await backend.history() == {"a": "client"}
    assert await in_use(registry) == {WORKER: (1, 2)}


@on_a_loop
async def test_an_admission_that_was_given_up_is_ended_by_the_next_heartbeat(backend: Backend) -> None:
    registry = await backend.node()
    await registry.announce(worker(slots=2))
    assert await registry.turn([], [asks("kept")]) == [YES]
    await given_up(registry.turn([], [asks("doubtful")]))
    await registry.beat([beat("kept", served=1)])
    assert [row["id"] for row in await registry.live()] == ["kept"]
    assert await registry.turn([], [asks("next"), asks("one more")]) == [YES, no("full")]


# ---- the store alone


@pytest.fixture
def store(stored: StoreBackend) -> Store:
    return stored.store


@pytest.fixture
def nodes(store: Store) -> tuple[str, str]:
    for name in ("a", "b"):
        store.nodes.register(NodeRow(f"{name}@1", name, 60_000))
        store.nodes.mark(f"{name}@1", "healthy")
    return "a@1", "b@1"


def test_two_connections_never_admit_more_than_a_worker_has(store: Store, stored: StoreBackend, nodes) -> None:
    """The second one waits for the first, and then counts what that one has left."""
    node, _ = nodes
    store.sessions.announce(node, [worker(slots=10, lifetime=50)])
    with_threads = 4

    def ask(n: int) -> int:
        with Store.open(stored.url, stored.folder, durable=False, busy_timeout=60.0) as mine:
            asked = [[asks(f"{n}-{turn}-{k}") for k in range(2)] for turn in range(10)]
            return sum(verdict.ok for turn in asked for verdict in mine.sessions.turn(node, [], turn))

    async def main() -> int:
        return sum(await asyncio.gather(*(asyncio.to_thread(ask, n) for n in range(with_threads))))

    assert asyncio.run(main()) == 10
    assert value(store, "SELECT count(*) FROM sessions WHERE ended_at IS NULL") == 10
    assert value(store, "SELECT served FROM session_workers") == 10


def test_an_admission_waits_for_one_that_is_not_committed_yet(store: Store, stored: StoreBackend, nodes) -> None:
    node, _ = nodes
    store.sessions.announce(node, [worker(slots=1)])
    found: list[Verdict] = []

    def ask() -> None:
        with Store.open(stored.url, stored.folder, durable=False, busy_timeout=60.0) as mine:
            found.extend(mine.sessions.turn(node, [], [asks("second")]))

    waiting = threading.Thread(target=ask)
    with pytest.MonkeyPatch.context() as patch, store.db.transaction():
        patch.setattr(store.db, "transaction", lambda name: contextlib.nullcontext(store.db.lock([name])))
        assert store.sessions.turn(node, [], [asks("first")]) == [YES]
        waiting.start()
        waiting.join(0.3)  # time enough to overtake the first one, if it could
        assert waiting.is_alive()
    waiting.join(60)
    assert found == [no("full")]


def test_the_release_of_a_node_ends_its_sessions_and_a_node_that_stops_says_so(store: Store, nodes) -> None:
    a, b = nodes
    for node in nodes:
        store.sessions.announce(node, [worker()])
        assert store.sessions.turn(node, [], [asks(f"of {node}")]) == [YES]
    store.db.run("node_mark", id=a, status="healthy", now=0)
    assert [row["id"] for row in store.nodes.declare_dead(b, "nowhere")] == [a]
    store.nodes.release(store.nodes.unreleased()[0])
    assert (store.sessions.find(f"of {a}") or {})["reason"] == "node-lost"
    assert (store.sessions.find(f"of {b}") or {})["ended_at"] is None
    store.nodes.end(b)
    assert (store.sessions.find(f"of {b}") or {})["reason"] == "shutdown"
    assert value(store, "SELECT count(*) FROM session_workers") == 0


def test_a_node_that_was_declared_dead_announces_nothing_and_its_late_rows_are_swept(store: Store, nodes) -> None:
    a, b = nodes
    store.sessions.announce(a, [worker()])
    store.db.run("node_mark", id=a, status="healthy", now=0)
    store.nodes.declare_dead(b, "nowhere")
    assert store.sessions.turn(a, [], [asks("late")]) == [YES]  # nobody has released it yet
    assert store.sessions.sweep()[0].sessions == ("late",)
    store.sessions.announce(a, [worker()])
    assert store.sessions.turn(a, [], [asks("later")]) == [no("unknown")]
    store.sessions.beat(a, [beat()], [worker()], [])
    assert store.sessions.turn(a, [], [asks("later")]) == [no("unknown")]
    store.sessions.announce(b, [worker()])
    store.sessions.turn(b, [], [asks("x")])
    store.db.run("drop_session_worker", node=b, **WORKER._asdict())
    store.db.run("node_mark", id=b, status="healthy", now=0)
    store.nodes.declare_dead("", "nowhere")
    assert store.sessions.sweep() == [Lost(b, "", 0, "", 0, ("x",))]


def test_sessions_are_listed_newest_first_page_by_page_and_filtered(store: Store, nodes) -> None:
    a, b = nodes
    other = WorkerKey("worker:firefox:0", 1)
    store.sessions.announce(a, [worker(slots=100), worker(*other, pool="ff", serves="firefox")])
    store.sessions.announce(b, [worker()])
    store.sessions.turn(a, [], [asks(f"s{n}") for n in range(7)])
    store.sessions.turn(a, [], [asks("f", other, pool="ff", serves="firefox", owner="user:5")])
    store.sessions.turn(b, [], [asks("of b")])
    store.sessions.turn(a, [over("s3"), over("s4")], [])
    seen, before = [], None
    while True:
        page, before = store.sessions.list(limit=2, before=before)
        assert len(page) <= 2
        seen += [(row["started_at"], row["id"]) for row in page]
        if before is None:
            break
    assert seen == sorted(seen, reverse=True) and len(seen) == 9

    def ids(**how: str) -> set[str]:
        return {row["id"] for row in store.sessions.list(**how)[0]}

    assert ids(state="ended") == {"s3", "s4"}
    assert ids(state="live", pool="chromium", node=a) == {"s0", "s1", "s2", "s5", "s6"}
    assert ids(pool="firefox") == ids(pool="ff") == ids(owner="user:5") == ids(component=other.component) == {"f"}
    assert ids(owner="user:5", pool="chromium") == set()
    assert store.sessions.find("nobody") is None


def test_old_sessions_and_those_beyond_the_number_are_deleted_in_steps_and_live_ones_stay(store: Store, nodes) -> None:
    node, _ = nodes
    store.sessions.announce(node, [worker(slots=100)])
    store.sessions.turn(node, [], [asks("live"), *(asks(f"s{n}") for n in range(10))])
    for n in range(10):
        store.db.run_many("end_sessions", [(f"s{n}", 1000 + n // 2, "client", None, None, 0, 0)])

    def ids() -> list[str]:
        return sorted(row["id"] for row in store.sessions.list(state="ended", limit=100)[0])

    assert not store.sessions.purge(None, 0, 100)
    assert store.sessions.purge(1002, 0, 3)
    assert not store.sessions.purge(1002, 0, 3)
    assert ids() == [f"s{n}" for n in range(4, 10)]
    assert not store.sessions.purge(None, 3, 100)
    assert ids() == ["s7", "s8", "s9"]
    assert not store.sessions.purge(2**60, 0, 100)
    assert [row["id"] for row in store.sessions.list()[0]] == ["live"]
