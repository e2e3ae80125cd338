"""Peaks of memory that outlive a node, on both databases."""

from __future__ import annotations

from ostler.store import Store
from ostler.store.footprints import Kind

MINILM = Kind("embedding", "org/minilm:v2", "torch")


def known(store: Store) -> dict[tuple[str, str], tuple[float, float, int | None, int]]:
    return {
        (r["model"], r["device"]): (r["host_mb"], r["gpu_mb"], r["load_ms"], r["runs"]) for r in store.footprints.all()
    }


def test_a_larger_peak_counts_in_full_and_a_smaller_one_by_a_quarter(store: Store) -> None:
    store.footprints.put(MINILM, "NVIDIA H200", 1000.5, 4000, 2500, 1)
    store.footprints.put(MINILM, "NVIDIA H200", 1200, 3000, None, 2)
    assert known(store) == {("org/minilm:v2", "NVIDIA H200"): (1200, 3750, 2500, 2)}


def test_kinds_and_devices_are_kept_apart(store: Store) -> None:
    store.footprints.put(MINILM, "cpu", 900, 0, 100, 1)
    store.footprints.put(MINILM, "NVIDIA H200", 500, 800, 100, 1)
    store.footprints.put(MINILM._replace(env="other"), "cpu", 700, 0, 100, 1)
    store.footprints.put(Kind("encode"), "cpu", 300, 0, None, 1)
    assert sorted((r["env"], r["device"], r["host_mb"]) for r in store.footprints.all()) == [
        ("", "cpu", 300),
        ("other", "cpu", 700),
        ("torch", "NVIDIA H200", 500),
        ("torch", "cpu", 900),
    ]


def test_what_was_not_measured_for_long_is_forgotten(store: Store) -> None:
    store.footprints.put(MINILM, "cpu", 1, 1, 1, 1000)
    store.footprints.put(Kind("new"), "cpu", 1, 1, 1, 2000)
    store.footprints.prune(1500)
    assert [r["task"] for r in store.footprints.all()] == ["new"]
