"""Optional parts that are not installed: one sentence with the command, and a demo that needs none of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ostler import extras

ROOT = Path(__file__).resolve().parents[2]
HIDING = f"""
from importlib.machinery import PathFinder
found = PathFinder.find_spec
hidden = {{*{[*{name for names in extras.MODULES.values() for name in names}]!r}}}
PathFinder.find_spec = classmethod(lambda cls, name, *more: None if name in hidden else found(name, *more))
"""


@pytest.fixture
def bare(tmp_path: Path):
    """`ostler` in an environment without extras, and without ffmpeg."""
    (tmp_path / "hiding").mkdir()
    (tmp_path / "hiding" / "sitecustomize.py").write_text(HIDING)
    env = {name: value for name, value in os.environ.items() if not name.startswith("OSTLER_")}
    env |= {"PYTHONPATH": f"{tmp_path / 'hiding'}:{ROOT / 'src'}", "PATH": str(tmp_path)}

    def ostler(*args: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "ostler", *args]
        return subprocess.run(argv, capture_output=True, text=True, timeout=100, cwd=tmp_path, env=env, check=False)

    return ostler


def test_without_extras_the_demo_runs_plain_jobs_and_recovers_the_one_whose_worker_was_killed(bare) -> None:
    done = bare("demo")
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"pip install -e '{ROOT}[clips]'" in done.stdout
    assert "kill -9" in done.stdout
    assert "requeued:crash" in done.stdout
    assert "4 of 4 jobs done" in done.stdout


def test_what_needs_an_extra_says_so_in_one_sentence_before_anything_else(bare, tmp_path: Path) -> None:
    for args, extra in (
        (("demo", "clips"), "clips"),
        (("demo", "music"), "music"),
        (("demo", "browsers"), "browsers"),
        (("check", "ostler.apps.clips"), "clips"),
        (("check", "ostler.apps.music"), "music"),
        (("check", "ostler.apps.browsers"), "browsers"),
        (("jobs", "--store", "postgresql://localhost/x"), "postgres"),
    ):
        done = bare(*args)
        assert done.returncode == 2, (args, done)
        assert done.stderr.strip().endswith(f"pip install -e '{ROOT}[{extra}]'"), (args, done.stderr)
        assert done.stderr.count("\n") == 1, done.stderr
    assert not (tmp_path / ".ostler-demo").exists()
    with socket.create_server(("127.0.0.1", 0)) as taken:  # its node cannot start
        done = bare("demo", "jobs", "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "the end of .ostler-demo/node.log:\n" in done.stderr and "in use" in done.stderr, done.stderr


def test_the_modules_of_each_extra_are_known() -> None:
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name: len(wanted) for name, wanted in stated.items() if name != "dev"} == {
        name: len(modules) for name, modules in extras.MODULES.items()
    }


def test_documents_install_from_the_clone_as_there_is_no_package_on_an_index() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert [page.name for page in pages if "pip install ostler" in page.read_text().replace("'", "")] == []
