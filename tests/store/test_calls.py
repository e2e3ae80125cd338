"""The log of calls, on both databases."""

from __future__ import annotations

from typing import Any

from ostler.store import Store
from ostler.store.calls import CallRow


def call(id: int, node: str = "a@1", **more: Any) -> CallRow:
    values: dict[str, Any] = {
        "request": f"r{id}",
        "task": "embedding",
        "model": "org/minilm:v2",
        "worker": "worker:embedding:0",
        "asked_at": id // 1000,
        "waited_ms": 0.5,
        "took_ms": 12.25,
        "bytes_in": 100,
        "bytes_out": 2000,
        "status": 200,
        "outcome": "done",
        "code": None,
        "streamed": 0,
        "host_mb": 812.5,
        "gpu_mb": None,
    }
    return CallRow(id, node, **{**values, **more})


def ids(store: Store, **how: Any) -> list[tuple[int, str]]:
    return [(row["id"], row["node"]) for row in store.calls.list(**how)[0]]


def test_a_call_is_found_as_it_was_written_and_a_second_write_changes_nothing(store: Store) -> None:
    rows = [call(5_000), call(6_000, took_ms=None, worker=None, status=429, outcome="refused", code="BUSY", streamed=1)]
    store.calls.add(rows)
    store.calls.add(rows)
    store.calls.add([])
    found, following = store.calls.list()
    assert following is None
    assert [CallRow(**row) for row in found] == [rows[1]._replace(streamed=True), rows[0]._replace(streamed=False)]


def test_calls_are_read_newest_first_page_by_page_also_where_two_nodes_share_a_moment(store: Store) -> None:
    store.calls.add([call(n, node) for n in (1, 2, 3) for node in ("a@1", "b@2")])
    seen, before = [], None
    while True:
        page, before = store.calls.list(limit=2, before=before)
        assert len(page) <= 2
        seen += [(row["id"], row["node"]) for row in page]
        if before is None:
            break
    assert seen == [(3, "b@2"), (3, "a@1"), (2, "b@2"), (2, "a@1"), (1, "b@2"), (1, "a@1")]


def test_calls_are_filtered_by_task_model_outcome_and_request(store: Store) -> None:
    store.calls.add([call(1), call(2, task="ocr"), call(3, model="other"), call(4, outcome="died", request="mine")])
    assert ids(store, task="ocr") == [(2, "a@1")]
    assert ids(store, model="other", task="embedding") == [(3, "a@1")]
    assert ids(store, outcome="died") == ids(store, request="mine") == [(4, "a@1")]
    assert ids(store, task="ocr", outcome="died") == []


def test_old_calls_and_those_beyond_the_number_are_deleted_in_steps(store: Store) -> None:
    store.calls.add([call(n * 1000) for n in range(1, 11)])
    assert not store.calls.purge(None, 0, 100)
    assert len(ids(store)) == 10
    assert store.calls.purge(3, 0, 2)  # the second and the third are left, with one who ended in that very millisecond
    assert not store.calls.purge(3, 0, 2)
    assert [id for id, _ in ids(store)] == [n * 1000 for n in range(10, 3, -1)]
    assert not store.calls.purge(None, 4, 100)
    assert [id for id, _ in ids(store)] == [10_000, 9_000, 8_000, 7_000]
    assert not store.calls.purge(None, 4, 100)
    assert len(ids(store)) == 4
