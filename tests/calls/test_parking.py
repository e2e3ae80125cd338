"""Parked models: their device memory is free, their process stays, and the next call wakes it. Real processes on a fake GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ostler.calls.parking import Rates, is_worth
from tests.calls.test_calls import answer, state
from tests.harness import Node, gone, until

APP = Path(__file__).parent / "parked_app.py"


def describe(fake: Path, **checkpoint: str) -> None:
    new = fake.with_suffix(".new")
    new.write_text(
        json.dumps({"gpus": [{"uuid": "GPU-0", "total_mb": 1000}], "folder": "used", "checkpoint": checkpoint})
    )
    new.replace(fake)


@pytest.fixture
def gpu(tmp_path: Path) -> Path:
    (tmp_path / "used").mkdir()
    describe(tmp_path / "gpus.json")
    return tmp_path / "gpus.json"


@pytest.fixture
def node(make_node, gpu: Path) -> Node:
    used = str(gpu.parent / "used")
    return make_node(app=APP, OSTLER_FAKE_GPUS=str(gpu), TEST_GPU_USED=used, OSTLER_GPU_HEADROOM_MB="50")


def of(node: Node, name: str) -> str:
    return str(state(node, name)["state"])


@pytest.mark.parametrize("task", ["driver", "itself"])
def test_two_models_under_a_budget_that_holds_one_are_parked_in_turn_and_never_loaded_again(
    node: Node, task: str
) -> None:
    first, second = (answer(node, task, model=model)[0] for model in ("one", "two"))
    until(lambda: of(node, f"{task}:one") == "PARKED", "it to be parked")
    for _ in range(3):
        assert [answer(node, task, model=model)[0] for model in ("one", "two")] == [first, second]
    assert {of(node, f"{task}:{model}") for model in ("one", "two")} == {"PARKED", "READY"}
    os.kill(first, 9)
    until(lambda: first not in {w["pid"] for w in node.workers()}, "its death to be noticed")
    assert answer(node, task, model="one")[0] != first, "a parked worker that dies is replaced"


def test_one_that_is_idle_is_parked_where_that_is_wanted_and_ends_where_not(node: Node) -> None:
    pid = answer(node, "brief")[0]
    until(lambda: of(node, "brief:brief") == "PARKED", "it to be parked")
    assert answer(node, "brief")[0] == pid
    answer(node, "ends")
    until(lambda: of(node, "ends:ends") == "IDLE", "the other to end")
    os.kill(node.process.pid, 9)
    gone(pid)


def test_one_that_cannot_be_parked_ends_and_one_that_cannot_be_woken_is_replaced(node: Node, gpu: Path) -> None:
    describe(gpu, park="not today")
    first = answer(node, "driver", model="one")[0]
    answer(node, "driver", model="two")
    assert of(node, "driver:one") != "PARKED"
    gone(first)
    describe(gpu, wake="the copy is gone")
    again = answer(node, "driver", model="one")[0]
    answer(node, "driver", model="two")
    until(lambda: of(node, "driver:one") == "PARKED", "it to be parked")
    assert answer(node, "driver", model="one")[0] != again, "its call is served by a new one"
    gone(again)


def test_a_model_whose_own_wake_raises_is_replaced(node: Node, gpu: Path) -> None:
    first = answer(node, "itself", model="one")[0]
    answer(node, "itself", model="two")
    (gpu.parent / "refuse").touch()
    assert answer(node, "itself", model="one")[0] != first
    gone(first)


def test_a_node_that_stops_takes_parked_models_along(node: Node) -> None:
    pids = [answer(node, "driver", model=model)[0] for model in ("one", "two")]
    node.stop()
    for pid in pids:
        gone(pid)


@pytest.mark.parametrize(
    ("served", "load", "mb", "room", "hurried", "expected"),
    [
        (10, 30.0, 4_000, 100_000, True, True),
        (10, 30.0, 4_000, 3_000, True, False),  # the host has no room for it
        (0, 30.0, 4_000, 100_000, True, False),  # nobody has called it
        (10, 0.5, 4_000, 100_000, False, False),  # it is loaded faster than woken
        (10, 4.0, 40_000, 100_000, True, False),  # others wait for 20 s for its copy
        (10, 60.0, 40_000, 100_000, True, True),
        (1, 20.0, 4_000, 100_000, False, True),
    ],
)
def test_parking_is_decided_by_cost(
    served: int, load: float, mb: float, room: float, hurried: bool, expected: bool
) -> None:
    found = is_worth(Rates(), mb=mb, load_s=load, served=served, host_room_mb=room, hurried=hurried)
    assert found is expected
