"""The examples run: each is started as its first lines say, and used. (The blocks of README.md run quickstart.py.)"""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

import pytest

from tests.harness import Node, call, until
from tests.servers import free_port

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def serve(make_node):
    """A node of an example's jobs."""
    return lambda jobs: make_node(app=EXAMPLES / jobs, OSTLER_WORKERS="1")


def python(node: Node, *command: str) -> str:
    environ = {**node.producer_env, "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environ, cwd=node.folder, timeout=90
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def running(node: Node, *command: str, port: int) -> Iterator[str]:
    """A web server beside the node."""
    with (node.folder / "web.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, *command], stdout=log, stderr=log, env=node.producer_env, cwd=node.folder
        )
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        assert process.poll() is None, (node.folder / "web.log").read_text()
        try:
            urllib.request.urlopen(url, timeout=60).close()
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            return False
        return True

    try:
        until(answers, "the web server to answer")
        yield url
    finally:
        process.terminate()
        process.wait(60)


def test_a_chain_and_a_batch_give_their_results(serve) -> None:
    said = python(serve("flows.py"), str(EXAMPLES / "flows.py"))
    assert said.splitlines() == ["words: 4", "each: [4, 4, 4, 4, 4]", "report: 5 pages, 0 failed, 20 words"]


def test_a_fastapi_app_enqueues_and_waits_for_results(serve) -> None:
    node, port, text = serve("fastapi_app/jobs.py"), free_port(), {"content-type": "text/plain"}
    command = ["-m", "uvicorn", "--app-dir", str(EXAMPLES / "fastapi_app"), "web:web", "--port", str(port)]
    with running(node, *command, port=port) as url:
        assert call(url, "POST", "/words", b"to be or not to be", text) == (200, {"be": 2, "not": 1, "or": 1, "to": 2})
        assert call(url, "POST", "/words", b" ", text) == (422, {"detail": "EMPTY: there are no words in this text"})
        status, started = call(url, "POST", "/jobs", b"one", text)
        assert status == 202
        until(lambda: call(url, "GET", f"/jobs/{started['id']}")[1]["result"] == {"one": 1}, "the job to be done")
        assert call(url, "GET", "/jobs/999")[0] == 404


def test_a_django_project_enqueues_and_its_jobs_use_its_models(serve) -> None:
    node, port, manage = serve("django_app/jobs.py"), free_port(), str(EXAMPLES / "django_app" / "manage.py")
    python(node, manage, "migrate")
    with running(node, manage, "runserver", "--noreload", str(port), port=port) as url:
        form = {"content-type": "application/x-www-form-urlencoded"}
        status, made = call(url, "POST", "/signup", b"name=ada", form)
        assert status == 201
        assert call(url, "GET", f"/jobs/{made['job']}") == (200, {"result": "Welcome, ada!"})
