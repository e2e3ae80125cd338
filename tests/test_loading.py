"""Loading an app stores nothing; everything else that imports its file may."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ostler import ConfigError, load
from ostler.store import Store

HEAD = """
import asyncio, threading
from ostler import Ostler

app = Ostler()


@app.job(queue="work")
def f(job, x: int = 0) -> int:
    return x


"""

CALLS = [
    "f.enqueue()",
    "f.enqueue_many([{'x': 1}, {'x': 2}])",
    "f.options(delay=5).enqueue(x=1)",
    "f.s(x=1).enqueue()",
    "f.s(x=1).then(f.s(), into='x').enqueue()",
    "app.batch([f.s(), f.s()], then=f.s())",
    "asyncio.run(f.enqueue_async())",
]


def write(folder: Path, code: str) -> Path:
    path = folder / "stores_at_import.py"
    path.write_text(HEAD + code)
    return path


def ostler(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OSTLER_DATA": str(folder / "data")}
    return subprocess.run(argv, capture_output=True, text=True, env=env, cwd=folder, timeout=60)


def stored(folder: Path) -> int:
    if not (folder / "data" / "ostler.db").exists():
        return 0
    with Store.open("", folder / "data") as store:
        return len(store.jobs.list()[0])


@pytest.mark.parametrize("call", CALLS)
def test_a_file_that_stores_a_job_when_it_is_loaded_is_refused_with_one_sentence(tmp_path: Path, call: str) -> None:
    path = write(tmp_path, call)
    done = ostler(tmp_path, sys.executable, "-m", "ostler", "check", str(path))
    assert (done.returncode, stored(tmp_path)) == (2, 0)
    assert len(done.stderr.strip().splitlines()) == 1
    line = path.read_text().splitlines().index(call) + 1
    assert f"(stores_at_import.py, line {line})" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr


def test_a_node_refuses_it_too_by_file_and_by_module(tmp_path: Path) -> None:
    write(tmp_path, "f.enqueue()")
    for target in ("stores_at_import.py", "stores_at_import", "stores_at_import:app"):
        done = ostler(tmp_path, sys.executable, "-m", "ostler", "up", target, "--port", "0")
        assert (done.returncode, stored(tmp_path)) == (2, 0)
        assert "enqueues a job while it is being imported" in done.stderr


@pytest.mark.parametrize(
    "argv",
    [["stores_at_import.py"], ["-m", "stores_at_import"], ["-c", "import stores_at_import"]],
    ids=["script", "module", "import"],
)
def test_other_ways_to_run_or_import_the_file_store_jobs(tmp_path: Path, argv: list[str]) -> None:
    write(tmp_path, "f.enqueue()\nasyncio.run(f.enqueue_async())")
    done = ostler(tmp_path, sys.executable, *argv)
    assert (done.returncode, stored(tmp_path)) == (0, 2), done.stderr


def test_a_call_under_main_is_for_the_script_alone(tmp_path: Path) -> None:
    path = write(tmp_path, 'if __name__ == "__main__":\n    f.enqueue()')
    assert ostler(tmp_path, sys.executable, "-m", "ostler", "check", str(path)).returncode == 0
    assert stored(tmp_path) == 0
    assert ostler(tmp_path, sys.executable, str(path)).returncode == 0
    assert stored(tmp_path) == 1


def test_other_threads_and_what_comes_after_the_load_are_not_affected(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OSTLER_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    code = "t = threading.Thread(target=f.enqueue)\nt.start()\nt.join()\nimport contextvars\nlater = contextvars.copy_context()\n"
    path = write(tmp_path, code)
    app = load(str(path))
    assert stored(tmp_path) == 1
    app.tasks["f"].enqueue()
    later = sys.modules["stores_at_import"].later
    later.run(app.tasks["f"].enqueue)  # as a task of an event loop would that the file has made
    assert stored(tmp_path) == 3
    del sys.modules["stores_at_import"]


def test_a_failed_load_leaves_nothing_behind(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("OSTLER_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(ConfigError, match="while it is being imported"):
        load(str(write(tmp_path, "f.enqueue()")))
    sys.modules["stores_at_import"].f.enqueue()
    assert stored(tmp_path) == 1
    del sys.modules["stores_at_import"]
