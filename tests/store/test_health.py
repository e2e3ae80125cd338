"""The health table: seed 001's operations, with generations."""

from __future__ import annotations

from ostler.store import Store
from ostler.store.rows import ExitRow
from tests.stores import statements

NODE, W = "n", "worker:tag:0"


def start(store: Store, generation: int = 1, now: int = 100) -> None:
    store.health.register(NODE, W, "tag", now)
    assert store.health.mark_starting(NODE, W, generation, 4242, 77, now)


def test_a_worker_walks_through_its_states(store: Store) -> None:
    start(store)
    health = store.health
    assert health.get_component(NODE, W)["status"] == "starting"
    assert health.mark(NODE, W, 1, "healthy", 200)
    assert health.get_component(NODE, W)["last_heartbeat"] == 200
    assert health.mark(NODE, W, 1, "draining", 300)
    assert health.mark(NODE, W, 1, "stopping", 300)
    assert health.mark_stopped(NODE, ExitRow(W, 1, 400, "stopped", "asked", code=0), 0)
    row = health.get_component(NODE, W)
    assert (row["status"], row["pid"], row["exit_code"], row["last_heartbeat"]) == ("stopped", None, 0, 200)


def test_a_ghost_cannot_overwrite_its_successor(store: Store) -> None:
    start(store, 1)
    start(store, 2)
    health = store.health
    assert not health.mark_starting(NODE, W, 2, 1, 1, 500)
    assert not health.mark(NODE, W, 1, "healthy", 500)
    assert not health.mark_crashed(NODE, ExitRow(W, 1, 500, "signal", "crash", code=-9), -9)
    assert not health.mark(NODE, W, 1, "failed", 500)
    assert health.update_heartbeats(NODE, [(W, 1, 900, 5.0)]) == 0
    row = health.get_component(NODE, W)
    assert (row["generation"], row["status"], row["restart_count"], row["last_heartbeat"]) == (2, "starting", 0, 100)
    assert health.exits(NODE, W) == []


def test_a_crash_is_counted_recorded_and_does_not_refresh_the_beat(store: Store) -> None:
    start(store)
    store.health.mark(NODE, W, 1, "healthy", 200)
    row = ExitRow(W, 1, 900, "signal", "crash", code=-9, signal="SIGKILL", peak_rss_mb=12.5, item="job:7", log=["bye"])
    assert store.health.mark_crashed(NODE, row, -9)
    found = store.health.get_component(NODE, W)
    assert (
        found["status"],
        found["restart_count"],
        found["streak"],
        found["last_restart"],
        found["last_heartbeat"],
    ) == ("crashed", 1, 1, 900, 200)
    assert found["metadata"]["log"] == ["bye"]
    (exit_,) = store.health.exits(NODE, W)
    assert (exit_["reason"], exit_["signal"], exit_["peak_rss_mb"], exit_["item"], exit_["log"]) == (
        "signal",
        "SIGKILL",
        12.5,
        "job:7",
        ["bye"],
    )
    assert store.health.counted_exits(NODE, W, 0) == [(900, "crash")]


def test_a_crash_that_does_not_count_is_kept_and_raises_no_count(store: Store) -> None:
    start(store)
    assert store.health.mark_crashed(NODE, ExitRow(W, 1, 900, "signal", "crash", code=-9, counted=False), -9)
    row = store.health.get_component(NODE, W)
    assert (row["status"], row["restart_count"], row["streak"]) == ("crashed", 0, 0)
    assert [e["counted"] for e in store.health.exits(NODE, W)] == [False]
    assert store.health.counted_exits(NODE, W, 0) == []


def test_a_finished_job_forgives_the_streak_and_the_window_but_not_the_lifetime_count(store: Store) -> None:
    start(store)
    store.health.mark_crashed(NODE, ExitRow(W, 1, 900, "exit", "crash", code=1), 1)
    store.health.add_exit(NODE, ExitRow(W, 1, 910, "exit", "clean", code=0))
    start(store, 2)
    store.health.forgive(NODE, W, 1)  # a ghost forgives nothing
    assert store.health.get_component(NODE, W)["streak"] == 1
    store.health.forgive(NODE, W, 2)
    row = store.health.get_component(NODE, W)
    assert (row["streak"], row["restart_count"]) == (0, 1)
    assert store.health.counted_exits(NODE, W, 0) == [(910, "clean")]


def test_starting_again_clears_the_last_exit(store: Store) -> None:
    start(store)
    store.health.mark_crashed(NODE, ExitRow(W, 1, 900, "exit", "crash", code=1), 1)
    start(store, 2)
    row = store.health.get_component(NODE, W)
    assert (row["exit_code"], row["exit_reason"], row["metadata"], row["restart_count"]) == (None, None, None, 1)


def test_reset_forgets_and_only_reset_leads_out_of_failed(store: Store) -> None:
    start(store)
    store.health.mark_crashed(NODE, ExitRow(W, 1, 900, "exit", "crash", code=1), 1)
    store.health.mark(NODE, W, 1, "failed", 900)
    store.health.register(NODE, W, "tag", 1000)
    assert store.health.get_component(NODE, W)["status"] == "failed"
    assert store.health.reset_restart_count(NODE, W)
    row = store.health.get_component(NODE, W)
    assert (row["status"], row["restart_count"], row["last_restart"], row["exit_code"], row["metadata"]) == (
        "stopped",
        0,
        None,
        None,
        None,
    )
    assert store.health.counted_exits(NODE, W, 0) == []
    assert len(store.health.exits(NODE, W)) == 1


def test_all_beats_are_one_statement(store: Store) -> None:
    names = [f"worker:tag:{n}" for n in range(12)]
    for name in names:
        store.health.register(NODE, name, "tag", 1)
        store.health.mark_starting(NODE, name, 1, 1, 1, 1)
    with statements(store) as sent:
        assert store.health.update_heartbeats(NODE, [(n, 1, 5000, 10.0) for n in names]) == 12
    assert len(sent) == 1
    rows = store.health.get_all_workers(NODE)
    assert [r["component"] for r in rows] == names  # in the order of their numbers, not of their letters
    assert all((r["last_heartbeat"], r["rss_mb"]) == (5000, 10.0) for r in rows)


def test_flags_default_to_enabled(store: Store) -> None:
    assert store.meta.pauses() == (True, frozenset())
    store.meta.set("worker_enabled", "false")
    store.meta.set("pool_paused:tag", "true")
    store.meta.set("pool_paused:x", "false")
    assert store.meta.pauses() == (False, frozenset({"tag"}))


def test_what_a_stopped_worker_waits_for_is_kept_beside_its_last_end(store: Store) -> None:
    store.health.register("n", "worker:q:0", "q", 1)
    assert store.health.mark_starting("n", "worker:q:0", 1, 7, 7, 2)
    ended = ExitRow(
        component="worker:q:0", generation=1, at=3, reason="signal", kind="asked", code=-9, signal="SIGKILL"
    )
    store.health.mark_stopped("n", ended, -9)
    assert store.health.mark_waiting("n", "worker:q:0", 1, "waits for memory: it needs 7 MB")
    metadata = store.health.get_component("n", "worker:q:0")["metadata"]
    assert (metadata["waiting_for"], metadata["signal"]) == ("waits for memory: it needs 7 MB", "SIGKILL")
    assert not store.health.mark_waiting("n", "worker:q:0", 0, "a ghost's")
    store.health.mark_waiting("n", "worker:q:0", 1, None)
    assert store.health.get_component("n", "worker:q:0")["metadata"]["waiting_for"] is None
    assert store.health.mark_starting("n", "worker:q:0", 2, 8, 8, 4)
    assert store.health.get_component("n", "worker:q:0")["metadata"] is None
