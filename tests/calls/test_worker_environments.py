"""Models in another environment: other Python versions, nothing of Ostler installed, a stand-in for `ostler`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.calls.bench import worker

VERSIONS = ("3.9", "3.10", "3.12", "3.13")


def interpreter(version: str) -> str | None:
    """A Python of that version on this machine."""
    places = [Path(root) for root in (os.environ.get("PYENV_ROOT", ""), str(Path.home() / ".pyenv")) if root]
    found = [p for place in places for p in sorted(place.glob(f"versions/{version}.*/bin/python"))]
    named = shutil.which(f"python{version}")
    for candidate in [*map(str, found), *([named] if named else [])]:
        done = subprocess.run(
            [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True
        )
        if done.stdout.strip() == version:
            return candidate
    return None


@pytest.fixture(params=VERSIONS)
def python(request) -> str:
    found = interpreter(request.param)
    if found is None:
        pytest.skip(f"there is no Python {request.param} on this machine")
    return found


def test_every_way_to_serve_works_under_another_python(tmp_path: Path, python: str) -> None:
    def at(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    with worker(at("odd"), "odd", python=python) as bench:
        assert bench.wait("ready")[1]["python"] in (python, bench.wait("ready")[1]["python"])
        found = bench.call({"do": "modules"}).result
        assert found["ostler"].endswith("standin/ostler/__init__.py")
        assert bench.call({"do": "nan"}).error[0] == 500
        assert bench.call({"do": "raise"}).error[1] == "MODEL_ERROR"
        assert bench.call({"do": "input"}).error[1] == "BAD_PAYLOAD"
        assert bench.call({"do": "deep"}).error[0] == 500
        deep = bench.client().post("/infer", b"[" * 100_000, content_type="application/json")
        assert deep.error[1] == "BAD_PAYLOAD"
    with worker(at("count"), "count", python=python) as bench:
        assert bench.call({"to": 2}).body.endswith(b"data: [DONE]\n\n")
    with worker(at("acount"), "acount", python=python, concurrency=4) as bench:
        assert bench.call({"to": 2}).body.endswith(b"data: [DONE]\n\n")
    for task in ("slow", "aslow"):
        with worker(at(task), task, python=python, concurrency=2) as bench:
            client = bench.client()
            client.start({"begun": "b", "seen": "s"})
            bench.noted("b")
            client.close()
            bench.noted("s")
            bench.say("stop")
            assert bench.ended() == 0
    for task in ("batch", "abatch"):
        with worker(at(task), task, python=python, batch=8) as bench:
            assert bench.call("one").error[2] == "ValueError: one"
            assert bench.call("x").result == "x"
    with worker(at("loads"), "loads", "broken", python=python, ready=False) as bench:
        assert bench.ended() == 71
        assert bench.wait("failed")[1] == "OSError: weights.bin is not there"


def test_neither_the_nodes_path_nor_the_users_packages_reach_another_environment(tmp_path: Path) -> None:
    (tmp_path / "leak").mkdir()
    environ = {"PYTHONPATH": str(tmp_path / "leak")}
    with worker(tmp_path, "odd", env="other", environ=environ) as bench:
        found = bench.call({"do": "modules"}).result
        assert str(tmp_path / "leak") not in found["path"]
        assert "PYTHONPATH" not in found["env"]
        assert found["env"]["PYTHONNOUSERSITE"] == "1"
    (tmp_path / "own").mkdir()
    with worker(
        tmp_path / "own",
        "odd",
        python=sys.executable,
        environ={"PYTHONPATH": os.environ.get("PYTHONPATH", "") + f":{tmp_path / 'leak'}"},
    ) as bench:
        found = bench.call({"do": "modules"}).result
        assert str(tmp_path / "leak") in found["path"]
        assert "standin" not in found["ostler"]


def test_an_import_that_is_missing_there_is_named_with_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "my_models.py"
    file.write_text("import json\nfrom ostler import Ostler\nimport not_here.at_all\napp = Ostler()\n")
    with worker(tmp_path, "echo", env="big", ready=False, target=str(file)) as bench:
        assert bench.ended() == 70
        said = bench.wait("failed")[1]
        for part in (
            str(file), "in environment 'big' (", "it imports 'not_here' (line 3), which is not installed there",
            "top-level imports of the file that declares a model must exist in the model's environment", "import it inside load()",
        ):  # fmt: skip
            assert part in said
        assert "Traceback" in bench.printed()


def test_a_file_that_is_too_new_for_that_python_says_so(tmp_path: Path) -> None:
    python = interpreter("3.9")
    if python is None:
        pytest.skip("there is no Python 3.9 on this machine")
    file = tmp_path / "newer.py"
    file.write_text("match 1:\n    case 1: pass\n")
    with worker(tmp_path, "echo", python=python, ready=False, target=str(file)) as bench:
        assert bench.ended() == 70
        said = bench.wait("failed")[1]
        assert "SyntaxError" in said
        assert "Python 3.9" in said
        assert "must also run under the Python of the model's environment" in said


def test_a_file_may_declare_anything_beside_its_models(tmp_path: Path) -> None:
    file = tmp_path / "everything.py"
    file.write_text(
        """
import ostler
from ostler import Body, Cancel, Fail, Job, Ostler, Published, Step, Task, load
from ostler.app import Ostler as Same

assert Same is Ostler
app = Ostler(store="postgresql://x", data="y")
app.pool("work", workers=3)
app.queue("work", at_once=2, rate="5/s")
app.command("web", ["sleep", "1"])

@app.job("work", attempts=2, cron="0 3 * * *")
def cut(job: Job, source: str) -> dict:
    return {"source": source}

assert cut(None, "a") == {"source": "a"}
chain = cut.s(source="a").then(cut.s(), into="source")
app.cron("x", "0 4 * * *", cut.options(priority=3).s(source="b"))

@app.web
def routes(api): ...

@app.sessions("chromium", slots=5)
def chromium(): ...

app.server("llm", ["llama-server", "--port", "{port}"], ready="http:/health")

@app.model("echo")
class Echo:
    def load(self, model_id): ...

    def infer(self, payload):
        assert routes is not None and chromium() is None
        try:
            cut.enqueue(source="x")
        except RuntimeError as error:
            return str(error)
"""
    )
    with worker(tmp_path, "echo", env="other", target=str(file)) as bench:
        assert "cannot be stored from a model that runs in another environment" in bench.call(1).result
