"""Job workers give way to calls: where the app has models, they run at a higher niceness than everything else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.harness import APP, Node, until

MODELS = Path(__file__).parent / "models.py"


def niceness(pid: int) -> set[int]:
    """Of all threads of a process, beyond our own."""
    stats = [path.read_text().rpartition(")")[2].split() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {int(fields[16]) - os.getpriority(os.PRIO_PROCESS, 0) for fields in stats}


def found(node: Node) -> dict[str, set[int]]:
    until(lambda: all(w["pid"] for w in node.workers()), "all workers to have a process")
    return {w["pool"]: niceness(w["pid"]) for w in node.workers()}


@pytest.mark.parametrize(("setting", "expected"), [({}, 5), ({"OSTLER_JOB_NICE": "0"}, 0)], ids=["by default", "off"])
def test_job_workers_beside_models_are_nicer_than_the_models_and_the_plane(
    make_node, setting: dict[str, str], expected: int
) -> None:
    node = make_node(app=MODELS, **setting)
    kind = {"content-type": "application/json"}
    assert node.post("/api/v1/calls/echo", {"model": "echo", "payload": 1}, **kind)[0] == 200
    assert found(node) == {"default": {expected}, "plane": {0}, "echo": {0}}


def test_job_workers_of_an_app_without_models_run_as_the_node_does(make_node) -> None:
    node = make_node(app=APP)
    if node.behind_plane:
        pytest.skip("this run puts every node behind the plane")
    assert set().union(*found(node).values()) == {0}
