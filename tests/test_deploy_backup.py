"""Backup and restore as docs/operations.md describes them: taken while the node runs, put back into a fresh directory."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest

OPERATIONS = (Path(__file__).resolve().parent.parent / "docs" / "operations.md").read_text()

APP = """
import time
from pathlib import Path
from ostler import Job, Ostler

app = Ostler()

@app.job(queue="a")
def makes(job: Job, text: str, until: str = "") -> str:
    job.event("begun")
    while until and not Path(until).exists():
        time.sleep(0.01)
    key = f"{job.id}/out.txt"
    if not job.published(key):
        (job.scratch / "out.txt").write_text(text)
        job.publish(job.scratch / "out.txt", key)
    return text
"""


def by_backup(source: Path, target: Path) -> None:
    """`.backup` of the sqlite3 program is this call."""
    with sqlite3.connect(source) as here, sqlite3.connect(target) as there:
        here.backup(there)
    here.close()
    there.close()


def by_vacuum(source: Path, target: Path) -> None:
    here = sqlite3.connect(source)
    here.execute("VACUUM INTO ?", (str(target),))
    here.close()


@pytest.mark.parametrize("take", [by_backup, pytest.param(by_vacuum, marks=pytest.mark.soak)])
def test_a_backup_of_a_running_node_is_restored_without_losing_or_mixing_up_a_job(
    make_node, tmp_path: Path, take
) -> None:
    app = tmp_path / "backed_up.py"
    app.write_text(APP)
    results, go = tmp_path / "results", tmp_path / "go"
    node = make_node("--pool", "a=1", app=app, OSTLER_RESULTS=str(results))
    done = node.enqueue("makes", text="done")
    node.wait_job(done, "done")
    running = node.enqueue("makes", text="running", until=str(go))
    node.wait_running(running)
    queued = node.enqueue("makes", text="queued")

    take(node.folder / "ostler.db", tmp_path / "copy.db")
    go.touch()
    lost = node.enqueue("makes", text="lost")  # after the backup: the job is lost, its artifact is there
    node.wait_job(lost, "done")
    node.kill()

    folder = tmp_path / "restored"
    folder.mkdir(0o700)
    (tmp_path / "copy.db").rename(folder / "ostler.db")
    database = sqlite3.connect(folder / "ostler.db")
    with database:
        database.execute(re.search(r"INSERT INTO jobs [^;\"]+", OPERATIONS)[0])
    database.close()

    after = make_node("--pool", "a=1", app=app, folder=folder, OSTLER_RESULTS=str(results))
    for job, text in ((done, "done"), (running, "running"), (queued, "queued")):
        found = after.wait_job(job)
        assert (found["status"], found["result"], found["crashes"]) == ("done", text, 0)
        assert (results / str(job) / "out.txt").read_text() == text
    assert after.events(done).count("processing") == 1
    assert after.get(f"/api/v1/jobs/{lost}")[0] == 404
    fresh = after.enqueue("makes", text="fresh")
    assert after.wait_job(fresh, "done")["result"] == "fresh"
    assert fresh > lost
    assert (results / str(fresh) / "out.txt").read_text() == "fresh"
