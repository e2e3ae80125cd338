"""Where models are, on both databases."""

from __future__ import annotations

from ostler.store import Store
from ostler.store.nodes import NodeRow
from ostler.store.places import PlaceRow


def alive(store: Store, name: str, lease_ms: int = 60_000) -> str:
    store.nodes.register(NodeRow(f"{name}@1", name, lease_ms, url=f"http://{name}:8356"))
    store.nodes.mark(f"{name}@1", "healthy")
    return f"{name}@1"


def test_a_node_says_what_it_has_and_that_is_all_it_has(store: Store) -> None:
    a, b = alive(store, "a"), alive(store, "b")
    store.places.put(
        a, [PlaceRow("embedding", "org/minilm:v2", "READY", 3, 0, 2), PlaceRow("ocr", "ocr", "IDLE", 0, 0, 1)]
    )
    store.places.put(b, [PlaceRow("ocr", "ocr", "BUSY", 0, 4, 2)])
    store.places.put(a, [PlaceRow("ocr", "ocr", "STARTING", 0, 1, 2)])
    found = [
        (row["node"], row["name"], row["url"], row["model"], row["state"], row["waiting"]) for row in store.places.all()
    ]
    assert found == [(a, "a", "http://a:8356", "ocr", "STARTING", 1), (b, "b", "http://b:8356", "ocr", "BUSY", 4)]
    store.places.put(b, [])
    assert [row["node"] for row in store.places.all()] == [a]


def test_what_a_node_has_that_does_not_live_is_not_read_and_is_cleared_by_others(store: Store) -> None:
    a, b, late = alive(store, "a"), alive(store, "b"), alive(store, "late", lease_ms=-1)
    for node in (a, b, late):
        store.places.put(node, [PlaceRow("ocr", "ocr", "READY", 1, 0, 2)])
    store.nodes.end(a)
    assert [row["node"] for row in store.places.all()] == [b]
    store.places.put(b, [PlaceRow("ocr", "ocr", "READY", 1, 0, 2)])
    store.nodes.forget(2**62)
    assert [row["node"] for row in store.places.all()] == [b]
