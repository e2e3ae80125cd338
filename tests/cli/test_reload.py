"""`ostler up --reload`: a change of the app's file is in force without a hand on the node."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from ostler.cli import reload
from tests.harness import Node, until

APP = """
from ostler import Job, Ostler

app = Ostler()


@app.job(queue="work")
def version(job: Job) -> int:
    return {number}
"""


class Reloading(Node):
    """A node that is started by a watching process."""

    def command(self) -> list[str]:
        return [*super().command(), "--reload"]

    def up(self) -> None:
        """Whatever process it is: the address of a running node is there, and it answers."""
        until(self._answers, "a node to answer")

    def _answers(self) -> bool:
        try:
            self._address(-1)
            return self.get("/readyz")[0] == 200
        except (OSError, ValueError):  # no address yet, or nobody there
            return False


def test_a_changed_file_is_loaded_a_broken_one_waited_for_and_nothing_is_left(tmp_path: Path) -> None:
    file = tmp_path / "app" / "mine.py"
    file.parent.mkdir()
    file.write_text(APP.format(number=1))
    node = Reloading(tmp_path / "data", file)
    watcher = node.start_process()
    try:
        node.up()
        assert node.wait_job(node.enqueue("version"))["result"] == 1
        (file.parent / "test_mine.py").write_text("")  # nothing of the app
        file.write_text("def broken(:\n")
        until(lambda: "the node keeps running the old code" in node.log(), "the broken file to be told")
        assert "SyntaxError" in node.log()
        assert node.wait_job(node.enqueue("version"))["result"] == 1
        file.write_text(APP.format(number=22))
        until(
            lambda: node.log().count("watching 2 files") == 2, "the new code to be loaded"
        )  # ostler.toml is one of them
        node.up()
        assert node.wait_job(node.enqueue("version"))["result"] == 22
        assert "test_mine.py" not in node.log()
        child = int(subprocess.check_output(["pgrep", "-P", str(watcher)], text=True).split()[0])
        node.signal(signal.SIGTERM)
        assert node.wait() == 0
        assert not Path(f"/proc/{child}").exists()
    finally:
        if node.process is not None and node.process.poll() is None:
            node.signal(signal.SIGKILL)  # what it started leaves with it
            node.wait()


def test_what_is_watched(tmp_path: Path) -> None:
    for name in ("a.py", "sub/b.py", "sub/notes.txt", ".git/c.py", "venv/lib/d.py", "venv/pyvenv.cfg", "data/e.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    files = reload.below(tmp_path, tmp_path / "data")
    assert {str(Path(path).relative_to(tmp_path)) for path in files} == {"a.py", "sub/b.py"}
    before = reload.look([*files, str(tmp_path / "ostler.toml")])
    assert reload.difference(before, reload.look(before)) is None
    os.utime(tmp_path / "a.py", ns=(1, 1))
    assert reload.difference(before, reload.look(before)) == "a.py"
    before = reload.look(before)
    (tmp_path / "ostler.toml").touch()
    assert reload.difference(before, reload.look(before)) == "ostler.toml"


def test_how_a_node_ended_is_said_in_words() -> None:
    assert (reload.ended_by(-9), reload.ended_by(2)) == ("killed by SIGKILL", "exit code 2")
