"""What nodes and workers are called, and which one a name means."""

from __future__ import annotations

import pytest

from ostler.errors import Conflict, NotFound
from ostler.store import Store, database, fleet
from ostler.store.fleet import Fleet
from ostler.store.nodes import NodeRow


def build(store: Store, *nodes: str) -> Fleet:
    for node in nodes:
        store.nodes.register(NodeRow(node, node.partition("@")[0], 30_000))
        for number in range(2):
            store.health.register(node, f"worker:tag:{number}", "tag", store.now())
    return fleet.read(store)


def test_the_workers_of_a_node_that_is_alone_need_no_node_in_their_names(store: Store) -> None:
    found = build(store, "a@1")
    assert [w["name"] for w in found.workers] == ["worker:tag:0", "worker:tag:1"]
    assert found.worker("tag:0") == found.worker("worker:tag:0") == found.worker("a/worker:tag:0")


def test_of_several_nodes_each_is_named_and_a_short_name_must_mean_one(store: Store) -> None:
    found = build(store, "a@1", "b@2")
    assert [w["name"] for w in found.workers][::2] == ["a/worker:tag:0", "b/worker:tag:0"]
    assert found.worker("b/tag:1")["node_id"] == "b@2"
    with pytest.raises(Conflict, match="a/worker:tag:0, b/worker:tag:0"):
        found.worker("worker:tag:0")
    assert len(found.several_named("tag")) == 4 and len(found.several_named("b/tag")) == 2
    for name in ("worker:nope:0", "c/worker:tag:0"):
        with pytest.raises(NotFound, match="known: "):
            found.worker(name)
    with pytest.raises(NotFound, match="no worker or pool 'nope'"):
        found.several_named("nope")


def test_nodes_that_share_a_name_are_called_by_their_ids(store: Store) -> None:
    found = build(store, "a@1", "a@2", "b@3")
    assert [n["label"] for n in found.nodes] == ["a@1", "a@2", "b"]
    assert found.worker("a@2/tag:0")["name"] == "a@2/worker:tag:0"
    with pytest.raises(Conflict, match="2 nodes are called 'a'; name one by its id: a@1, a@2"):
        found.worker("a/tag:0")


def test_a_node_that_stopped_in_order_is_not_shown_and_one_that_died_is_until_its_name_is_back(store: Store) -> None:
    build(store, "a@1", "b@2", "c@3")
    store.nodes.end("b@2")
    store.db.run("node_mark", id="c@3", status="healthy", now=0)  # it was last heard long ago
    silent = fleet.read(store)
    assert {n["label"]: (n["status"], n["alive"]) for n in silent.nodes} == {
        "a": ("starting", True),
        "c": ("healthy", False),
    }
    assert [w["name"] for w in silent.workers] == ["worker:tag:0", "worker:tag:1"]  # of the one that lives
    assert [n["id"] for n in store.nodes.declare_dead("a@1", "elsewhere")] == ["c@3"]
    assert {n["label"]: n["status"] for n in fleet.read(store).nodes} == {"a": "starting", "c": "dead"}
    store.nodes.register(NodeRow("c@4", "c", 30_000))
    assert [n["id"] for n in fleet.read(store).nodes] == ["a@1", "c@4"]


def test_a_node_whose_clock_is_wrong_does_not_look_silent(store: Store) -> None:
    build(store, "a@1")
    ahead = 3_600_000
    store.db.run("node_beat", id="a@1", now=store.now(), skew=ahead)
    store.health.mark_starting("a@1", "worker:tag:0", 1, 1, 1, store.now() + ahead)
    assert fleet.read(store).worker("tag:0")["heartbeat_age"] < 60
    assert fleet.shown(fleet.read(store).nodes[0])["skew_ms"] == ahead


def test_a_store_is_shown_without_user_and_password() -> None:
    assert database.shown("") == "sqlite"
    assert (
        database.shown("postgresql://joe:s3cret@db:5433/app?schema=x&password=s3cret")
        == "postgresql://db:5433/app?schema=x"
    )
    assert "s3cret" not in database.shown("postgres://joe:s3cret@/app?host=/run/pg&sslpassword=s3cret")
