"""Nodes: who lives, who is declared dead, and what becomes of what they had."""

from __future__ import annotations

from pathlib import Path

import pytest

from ostler.errors import NodeLost
from ostler.jobs.waiting import explain
from ostler.store import Store
from ostler.store.limits import QueueLimit
from ostler.store.nodes import NodeRow
from ostler.store.rows import ExitRow, Finish, NewJob, Requeue, Turn
from tests.stores import no_events

W = "worker:q:0"


def start(store: Store, node: str = "n@1", lease_ms: int = 30_000, home: str = "h1", name: str = "n") -> NodeRow:
    row = NodeRow(node, name, lease_ms, home=home)
    store.nodes.register(row)
    return row


def turn(number: int, node: str = "n@1", **more) -> Turn:
    return Turn(node, 1000, number=number, **more)


def status(store: Store, node: str) -> str:
    return next(n["status"] for n in store.nodes.all() if n["id"] == node)


def task(name: str, queue: str = "q") -> dict:
    return {
        "name": name,
        "queue": queue,
        "attempts": 3,
        "timeout": None,
        "priority": 0,
        "policy": "{}",
        "parameters": "[]",
    }


def test_a_node_is_dead_when_its_beat_is_older_than_its_lease_and_its_jobs_run_again(store: Store) -> None:
    start(store, "late@1", lease_ms=-1, home="h1")
    start(store, "n@1", home="h2")
    store.jobs.enqueue([NewJob("t", "q", "{}")], 1)
    (claim,) = store.turns.take(turn(1, "late@1", wants={"q": [W]})).claims
    assert [n["id"] for n in store.nodes.declare_dead("n@1", "h2")] == ["late@1"]
    (dead,) = store.nodes.unreleased()
    assert store.nodes.release(dead) == [claim.id]
    assert store.nodes.unreleased() == []
    job = store.jobs.get(claim.id)
    assert (job["status"], job["attempt"], job["crashes"]) == ("queued", 0, 0)
    assert job["events"][-1]["name"] == "requeued:stale"


def test_a_node_of_our_own_data_directory_is_dead_because_we_hold_its_lock(store: Store) -> None:
    start(store, "n@1", home="here")
    start(store, "n@2", home="there")
    assert [n["id"] for n in store.nodes.declare_dead("n@3", "here")] == ["n@1"]
    assert (status(store, "n@1"), status(store, "n@2")) == ("dead", "starting")
    began = store.now() - 60_000
    start(store, "n@4", home="here")
    assert store.nodes.declare_dead("n@3", "here", since=began) == [], "it runs on a copy of the directory"


def test_nothing_that_a_dead_node_writes_is_taken(store: Store) -> None:
    start(store, "n@1", home="here")
    store.jobs.enqueue([NewJob("t", "q", "{}")], 1)
    (claim,) = store.turns.take(turn(1, wants={"q": [W]})).claims
    store.nodes.declare_dead("n@2", "here")
    done = Finish(claim.id, claim.fence, "done", 1, 2, "done")
    with pytest.raises(NodeLost, match="n@1 was declared dead"):
        store.turns.take(turn(2, finishes=[done], wants={"q": [W]}))
    with pytest.raises(NodeLost):
        store.nodes.beat("n@1")
    assert not store.nodes.mark("n@1", "healthy")
    assert store.jobs.get(claim.id)["status"] == "processing"


def test_a_turn_that_was_committed_is_not_written_twice(store: Store) -> None:
    """The answer to its commit was lost, so the node tries again."""
    start(store)
    store.jobs.enqueue([NewJob("t", "q", "{}") for _ in range(3)], 1)
    (first,) = store.turns.take(turn(1, wants={"q": [W]})).claims
    done = Finish(first.id, first.fence, "done", 1, 2, "done")
    taken = store.turns.take(turn(2, finishes=[done], wants={"q": [W]}))
    again = store.turns.take(turn(2, finishes=[done], wants={"q": [W]}))
    assert (again.replayed, again.claims, again.lost) == (True, taken.claims, [])
    assert store.jobs.depths() == {"q": {"queued": 1, "processing": 1}}


def test_a_start_takes_over_the_history_of_the_last_node_of_its_name(store: Store) -> None:
    start(store, "n@1")
    store.health.register("n@1", W, "q", 1)
    store.health.mark_starting("n@1", W, 3, 7, 7, 1)
    store.health.mark_crashed("n@1", ExitRow(W, 3, 5, "exit", "crash", code=1), 1)
    store.nodes.end("n@1")
    start(store, "n@2")
    start(store, "n@3")
    assert [w["node"] for w in store.health.get_all_workers()] == ["n@2"]
    assert store.health.get_component("n@2", W)["restart_count"] == 1
    assert len(store.health.exits("n@2", W)) == 1


def test_two_living_nodes_of_one_name_have_their_own_rows(store: Store) -> None:
    start(store, "n@1", home="h1")
    start(store, "n@2", home="h2")
    for node in ("n@1", "n@2"):
        store.health.register(node, W, "q", 1)
    assert [w["node"] for w in store.health.get_all_workers()] == ["n@1", "n@2"]


def test_what_only_ended_nodes_declare_is_gone_and_its_jobs_wait_out_of_line(store: Store) -> None:
    start(store, "old@1", name="old", home="h1")
    store.nodes.declare("old@1", [task("stays"), task("goes")], [])
    store.jobs.enqueue([NewJob("goes", "q", "{}", limit_key="k", limit_max=1), NewJob("stays", "q", "{}")], 1)
    start(store, "new@1", name="new", home="h2")
    store.nodes.declare("new@1", [task("stays"), task("comes")], [])
    assert sorted(store.jobs.tasks()) == ["comes", "goes", "stays"]  # the old one still runs
    tasks = frozenset({"stays", "comes"})
    assert [c.task for c in store.turns.take(turn(1, "new@1", wants={"q": [W] * 4}, tasks=tasks)).claims] == ["stays"]
    store.nodes.end("old@1")
    store.nodes.drop_undeclared()
    assert sorted(store.jobs.tasks()) == ["comes", "stays"]
    assert store.nodes.park() == 1
    assert store.nodes.unserved() == [{"task": "goes", "queue": "q", "n": 1}]
    assert not store.jobs.ready(["q"], 5)
    start(store, "old@2", name="old", home="h1")
    store.nodes.declare("old@2", [task("goes")], [])
    assert store.nodes.park() == 1
    claims = store.turns.take(turn(1, "old@2", wants={"q": [W]}, tasks=frozenset({"goes"}))).claims
    assert [c.task for c in claims] == ["goes"]


def test_rows_of_ended_nodes_are_forgotten_after_a_while(store: Store) -> None:
    start(store, "n@1")
    store.nodes.end("n@1")
    for node in store.nodes.unreleased():
        store.nodes.release(node)
    assert store.nodes.forget(before=1) == []
    assert store.nodes.forget(before=store.now() + 1) == ["n@1"]
    assert store.nodes.all() == []


def test_a_wish_reaches_its_node_and_is_answered_once(store: Store) -> None:
    start(store)
    wish = store.nodes.wish("n@1", "restart", W)
    assert store.nodes.answer(wish) is None
    assert [(w["id"], w["verb"], w["target"]) for w in store.nodes.wishes("n@1")] == [(wish, "restart", W)]
    store.nodes.grant(wish, {"ok": True})
    store.nodes.grant(wish, {"ok": False})
    assert store.nodes.answer(wish) == {"ok": True}
    assert store.nodes.wishes("n@1") == []


def test_the_end_of_a_worker_that_is_written_twice_counts_once(store: Store) -> None:
    """The answer to the first write was lost, so the lane tried again."""
    start(store)
    store.health.register("n@1", W, "q", 1)
    store.health.mark_starting("n@1", W, 1, 7, 7, 1)
    end = ExitRow(W, 1, 5, "exit", "crash", code=1)
    assert store.health.mark_crashed("n@1", end, 1)
    assert store.health.mark_crashed("n@1", end, 1)
    assert store.health.get_component("n@1", W)["restart_count"] == 1
    assert len(store.health.exits("n@1", W)) == 1


def waits(store: Store, node: str) -> list[str]:
    return next(n["waits"] for n in store.nodes.all() if n["id"] == node)


@pytest.fixture
def shared_store(database: str, tmp_path: Path):
    """On PostgreSQL, where a node's row says for what it waits."""
    with Store.open(database, tmp_path) as opened:
        yield opened


def test_a_row_says_for_which_queues_its_node_waits_also_after_it_came_back(shared_store: Store) -> None:
    store = shared_store
    start(store)
    assert store.turns.take(turn(1, wants={"q": [W]})).again
    assert not store.turns.take(turn(2, wants={"q": [W]})).again
    assert waits(store, "n@1") == ["q"]
    start(store, "n@2")  # it was declared dead: a new row, the same connection
    assert store.turns.take(turn(3, "n@2", wants={"q": [W]})).again
    assert waits(store, "n@2") == ["q"]


def test_a_turn_that_was_not_committed_has_told_nobody_for_what_its_node_waits(shared_store: Store) -> None:
    store = shared_store
    start(store)
    (job,) = store.jobs.enqueue([NewJob("t", "q", "{}")], 1)
    (claim,) = store.turns.take(turn(1, wants={"q": [W]})).claims
    back = Requeue(job, claim.fence, "returned", 1000, run_at=10**15)
    with no_events(store), pytest.raises(Exception, match="no room"):
        store.turns.take(turn(2, requeues=[back], wants={"q": [W]}))
    assert store.turns.take(turn(3, requeues=[back], wants={"q": [W]})).again
    assert waits(store, "n@1") == ["q"]


def test_a_schedule_whose_app_is_away_for_a_while_fires_what_it_missed(store: Store) -> None:
    """Another app's node looks after the store meanwhile; it neither fires the schedule nor forgets it."""
    step = {"task": "t", "queue": "q", "args": "{}", "attempts": 3, "timeout": None, "priority": 0}
    due = {"name": "nightly", "spec": "every 1h", "zone": "UTC", "step": step, "next_at": store.now() + 100}
    start(store, "a@1", name="a", home="h1")
    store.nodes.declare("a@1", [], [due])
    start(store, "b@1", name="b", home="h2")
    store.nodes.declare("b@1", [], [])
    store.nodes.end("a@1")
    store.nodes.drop_undeclared()
    assert store.jobs.schedules.all() == []
    later = store.now() + 200
    assert store.jobs.schedules.fire("b@1", later, lambda *_: later + 3_600_000) == ([], None)
    start(store, "a@2", name="a", home="h1")
    store.nodes.declare("a@2", [], [{**due, "next_at": later + 3_600_000}])
    assert [s["next_at"] for s in store.jobs.schedules.all()] == [due["next_at"]]
    jobs, following = store.jobs.schedules.fire("a@2", later, lambda *_: later + 3_600_000)
    assert (len(jobs), following) == (1, later + 3_600_000)


def test_a_job_that_waits_out_of_line_and_is_cancelled_leaves_the_counts_right(store: Store) -> None:
    start(store)
    store.nodes.declare("n@1", [task("goes")], [])
    (job,) = store.jobs.enqueue([NewJob("goes", "q", "{}")], 1)
    store.nodes.declare("n@1", [], [])
    assert store.nodes.park() == 1
    assert store.jobs.depths() == {"q": {"queued": 1}}
    store.jobs.cancel(job, 5)
    assert store.jobs.depths() == {"q": {"cancelled": 1}}


def test_jobs_of_a_task_that_no_node_has_declared_yet_are_told_and_come_back_with_it(store: Store) -> None:
    """Whoever enqueued them has newer code than the node."""
    start(store)
    store.nodes.declare("n@1", [task("old")], [])
    store.jobs.enqueue([NewJob("new", "q", "{}"), NewJob("old", "q", "{}"), NewJob("elsewhere", "r", "{}")], 1)
    found = explain(store, 1, 5)
    assert found is not None
    assert found["reason"] == "no_task"  # at once, before anybody has looked after it
    assert store.nodes.strangers()
    assert store.nodes.park() == 1
    assert not store.nodes.strangers()
    assert [(row["task"], row["n"]) for row in store.nodes.unserved()] == [("new", 1)]
    assert [row["name"] for row in store.db.run("tasks")] == ["old"]
    store.nodes.declare("n@1", [task("old"), task("new")], [])
    assert store.nodes.park() == 1
    assert store.nodes.unserved() == []
    found = explain(store, 1, 5)
    assert found is not None
    assert found["reason"] != "no_task"


def test_a_turn_that_is_a_little_behind_does_not_fill_a_rate_twice(store: Store) -> None:
    """Nodes take the time before they get the lock of the queue, so their times come out of order."""
    start(store)
    store.jobs.enqueue([NewJob("t", "q", "{}") for _ in range(40)], 1)
    limit = {"q": QueueLimit(rate=10.0, burst=10.0)}
    got, number = 0, 0
    for now in (10_000, 10_500, 10_000, 10_500, 10_000, 10_500):
        number += 1
        got += len(store.turns.take(Turn("n@1", now, wants={"q": [W] * 20}, limits=limit, number=number)).claims)
    assert got == 15
