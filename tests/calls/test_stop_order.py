"""A node that stops: jobs that may finish can still call its models."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.harness import until

APP = """
from pathlib import Path
import time

from ostler import Job, Ostler

app = Ostler()


@app.model("double", idle=600)
class Double:
    def load(self, model_id):
        pass

    def infer(self, payload):
        return 2 * payload


@app.job(queue="work", attempts=1)
def calls(job: Job, folder: str) -> int:
    first = app.call_sync("double", None, 10, timeout=30)
    (Path(folder) / "called").touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.02)
    return first + app.call_sync("double", None, 1, timeout=30)
"""


def test_a_job_that_finishes_while_its_node_stops_can_call_a_model(make_node, tmp_path: Path) -> None:
    app = tmp_path / "calling.py"
    app.write_text(APP)
    node = make_node("--pool", "work=1", app=app, OSTLER_STOP_GRACE="60")
    job = node.enqueue("calls", folder=str(tmp_path))
    until(lambda: (tmp_path / "called").exists(), "the first call")
    node.signal(signal.SIGTERM)
    until(lambda: "stopping: running work" in node.log(), "the node to stop")
    beat = node.wait_status("worker:work:0", "draining")["last_heartbeat"]
    # What was written down before that heartbeat is seen.
    node.wait_worker("worker:work:0", "another heartbeat", lambda w: w["last_heartbeat"] > beat)
    assert node.worker("worker:double:0")["status"] == "healthy", "it is needed until the job has ended"
    (tmp_path / "go").touch()
    assert node.wait() == 0
    with node.open_store() as store:
        found = store.jobs.find(job)
    assert (found["status"], found["result"]) == ("done", 22)
