"""docs/tutorial.md: it prints the files of examples/tutorial, and what it tells the reader to type works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.harness import Node, call

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "tutorial"
PAGE = (ROOT / "docs" / "tutorial.md").read_text()


def blocks(language: str) -> list[str]:
    """Those that are not marked `<!-- not run: … -->`."""
    return re.findall(rf"(?<!-->)\n```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory):
    node = Node(tmp_path_factory.mktemp("tutorial"), EXAMPLE / "web.py").start()
    yield node
    node.stop()


@pytest.mark.parametrize("file", sorted(path.name for path in EXAMPLE.iterdir() if path.is_file()))
def test_the_page_prints_the_files_of_the_example(file: str) -> None:
    printed = re.search(rf"`{re.escape(file)}`:\n\n```\w+\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert printed and printed[1] == (EXAMPLE / file).read_text()


def test_the_tests_of_the_example_pass() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_uploaded_text_gets_a_report_and_highlights(node: Node) -> None:
    text = b"Call me Ishmael. It rained. Ishmael saw whales. Whales swim."
    status, sent = call(node.url, "POST", "/reader/texts?title=Moby", text, {"content-type": "text/plain"})
    assert status == 201
    job = node.get(f"/api/v1/jobs/{sent['job']}?wait=60")[1]
    assert (job["status"], job["result"]["words"]) == ("done", 10)
    with urllib.request.urlopen(f"{node.url}/api/v1/artifacts/{job['result']['report']}", timeout=60) as report:
        assert report.read().decode().startswith("Moby\n\n      10 words\n")
    assert len(node.get(f"/reader/texts/{sent['job']}/highlights")[1]) == 3


def test_old_uploads_are_deleted(node: Node) -> None:
    upload = node.folder / "uploads" / "old.txt"
    upload.write_text("old")
    os.utime(upload, (0, 0))
    node.wait_job(node.enqueue("delete_uploads"), "done")
    assert not upload.exists()


def test_what_the_page_tells_to_type_works(node: Node, tmp_path: Path) -> None:
    (ostler := tmp_path / "ostler").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ostler "$@"\n')
    ostler.chmod(0o755)
    path = os.pathsep.join([str(EXAMPLE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": path,
        "OSTLER_DATA": str(node.folder),
    }
    commands = [["bash", "-ec", block] for block in blocks("sh") if not block.startswith("ostler up")]
    commands.insert(
        1,
        [
            sys.executable,
            "-c",
            next(block for block in blocks("python") if ".enqueue(" in block and "Bench" not in block),
        ],
    )
    for *program, block in commands:
        text = block.replace("localhost:8356", node.url.removeprefix("http://"))
        done = subprocess.run(
            [*program, text], cwd=node.folder, env=environ, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
