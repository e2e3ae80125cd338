"""Code around a worker's jobs: once after its start, once before its exit."""

from __future__ import annotations

from pathlib import Path

from tests.harness import until

APP = """
import os
from pathlib import Path
from ostler import Ostler

app = Ostler()
here = Path(os.environ["HERE"])
model = {}


def note(text):
    with (here / "notes").open("a") as file:
        file.write(text + "\\n")


@app.on_start("a")
def load():
    model["loaded"] = os.getpid()
    os.environ["SET_BY_HOOK"] = "yes"
    note("start a")


@app.on_start()
async def connect():
    model["connected"] = True
    if (here / "broken").exists():
        raise RuntimeError("no connection")


@app.on_stop("a")
def unload():
    note("stop a 1")


@app.on_stop("a")
async def close():
    note("stop a 2")
    raise RuntimeError("does not matter")


@app.job(queue="a")
def use(job):
    return {"same": model["loaded"] == os.getpid(), "connected": model["connected"], "env": os.environ["SET_BY_HOOK"]}


@app.job(queue="b")
def other(job):
    return sorted(model)
"""


def test_hooks_run_once_in_each_worker_of_their_queue(make_node, store_url: str, tmp_path: Path) -> None:
    app = tmp_path / "hooked.py"
    app.write_text(APP)
    node = make_node("--pool", "a=1", "--pool", "b=1", app=app, HERE=str(tmp_path))
    for _ in range(2):
        done = node.wait_job(node.enqueue("use"), "done")
        assert done["result"] == {"same": True, "connected": True, "env": "yes"}
    assert node.wait_job(node.enqueue("other"), "done")["result"] == ["connected"]
    notes = tmp_path / "notes"
    assert notes.read_text() == "start a\n"
    assert node.stop() == 0
    assert notes.read_text() == "start a\nstop a 2\nstop a 1\n", (
        "the last declared first, and one that raises stops no other"
    )


def test_a_worker_whose_start_hook_raises_does_not_become_ready(make_node, store_url: str, tmp_path: Path) -> None:
    app = tmp_path / "hooked.py"
    app.write_text(APP)
    (tmp_path / "broken").touch()
    node = make_node("--pool", "a=1", "--pool", "b=0", app=app, ready=False, HERE=str(tmp_path))
    job = node.enqueue("use")
    row = node.wait_worker("worker:a:0", "its crash", lambda w: w["restart_count"] >= 1)
    assert row["exit_code"] == 1
    assert "no connection" in node.get("/api/v1/workers/worker:a:0")[1]["exits"][0]["log"][-1]
    why = until(lambda: node.get(f"/api/v1/jobs/{job}")[1]["waiting_for"]["text"], "the reason")
    assert "worker:a:0" in why and "RuntimeError: no connection" in why, why
    (tmp_path / "broken").unlink()
    node.wait_job(job, "done")


def test_a_hook_for_a_queue_that_no_job_uses_is_refused(make_node, tmp_path: Path) -> None:
    app = tmp_path / "hooked.py"
    app.write_text(APP.replace('@app.on_stop("a")\ndef', '@app.on_stop("nope")\ndef'))
    node = make_node(app=app, start=False, HERE=str(tmp_path))
    node.start_process()
    assert node.wait() == 2
    until(lambda: "on_start or on_stop for queue 'nope'" in node.log(), "the reason")
