"""A really full disk: the node's data directory is on a small file system of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import Node, until
from tests.servers import Server

SIZE_MB = 8
SERVER_MB = 24  # an empty database has 8


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of a few megabytes."""
    with mounted(tmp_path / "disk", SIZE_MB):
        yield tmp_path / "disk"


@contextlib.contextmanager
def mounted(folder: Path, megabytes: int) -> Iterator[None]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0755", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"a small file system cannot be mounted: {error}")
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted (root may): {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def small_server_disk(postgres: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The store is in a database on a small file system of the server; the server's log of changes is elsewhere."""
    if not postgres.ours:
        pytest.skip("the server's disks are not ours")
    folder = postgres.start().folder / "small"
    with mounted(folder, SERVER_MB):
        owner = postgres.data.stat()
        os.chown(folder, owner.st_uid, owner.st_gid)
        postgres.sql(f"CREATE TABLESPACE small LOCATION '{folder}'")
        postgres.sql("CREATE DATABASE small TEMPLATE template0 TABLESPACE small")
        monkeypatch.setenv("OSTLER_STORE", postgres.url("small"))
        yield folder
        postgres.drop_database("small")
        postgres.sql("DROP TABLESPACE small")


def fill(folder: Path) -> Path:
    """Take all room that is left."""
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as file:
        for size in (65_536, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    assert os.statvfs(folder).f_bavail == 0
    return ballast


def refused(node: Node, body: dict) -> tuple[list[int], dict]:
    """Enqueue until the node refuses; (the ids that it gave, the refusal)."""
    stored: list[int] = []
    while len(stored) < 2000:
        status, answer = node.post("/api/v1/jobs", body)
        if status != 201:
            assert status == 503, answer
            return stored, answer["error"]
        stored.append(answer["id"])
    raise AssertionError("the disk never became full")


def test_a_full_disk_refuses_jobs_and_loses_none(small_disk: Path, make_node, tmp_path: Path) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0", folder=small_disk / "data", OSTLER_STORE_PATIENCE="0.5")
    running, stored, runs, go = backlog(node, tmp_path)
    ballast = fill(small_disk)

    more, error = refused(node, {"task": "mark", "args": {"path": str(runs)}})
    assert error["code"] == "STORE_BUSY"
    assert "full" in error["message"]
    assert "nothing was stored" in error["message"]
    assert enqueue_elsewhere(node, runs) == "StoreBusy"
    go.touch()
    until(lambda: node.get("/api/v1/health")[1]["status"] == "error", "the result that has no room to show")
    assert node.get("/healthz")[0] == 200
    assert not runs.exists(), "nothing runs without a record"

    ballast.unlink()
    done = node.wait_job(running)
    assert (done["status"], done["result"], done["attempt"]) == ("done", "seen", 1)
    later = node.enqueue("mark", path=str(runs))
    assert all(node.wait_job(job)["status"] == "done" for job in (*stored, *more, later))
    assert runs_of(runs) == sorted([*stored, *more, later]), "each stored job ran once, and no other did"
    until(lambda: node.get("/api/v1/health")[1]["status"] == "healthy", "all to be well again")


def test_a_node_that_was_killed_on_a_full_disk_starts_when_there_is_room(
    small_disk: Path, make_node, tmp_path: Path
) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0", folder=small_disk / "data", OSTLER_STORE_PATIENCE="0.5")
    running, stored, runs, go = backlog(node, tmp_path)
    ballast = fill(small_disk)
    more, _ = refused(node, {"task": "mark", "args": {"path": str(runs)}})
    node.kill()
    ballast.unlink()
    go.touch()
    node.start()
    assert all(node.wait_job(job)["status"] == "done" for job in (running, *stored, *more))
    assert runs_of(runs) == sorted([*stored, *more])


def test_a_full_disk_of_the_server_refuses_jobs_and_loses_none(
    small_server_disk: Path, make_node, tmp_path: Path
) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=0", OSTLER_STORE_PATIENCE="0.5")
    running, stored, runs, go = backlog(node, tmp_path)
    ballast = fill(small_server_disk)
    more, error = refused(node, {"task": "mark", "args": {"path": str(runs)}})
    assert error["code"] == "STORE_BUSY"
    assert "No space left on device" in error["message"]
    assert "nothing was stored" in error["message"]
    assert node.get("/healthz")[0] == 200
    assert enqueue_elsewhere(node, runs) == "StoreBusy"
    node.kill()
    node.start_process()
    # Pages that the server has emptied meanwhile may have room for what a start writes.
    until(
        lambda: "waiting for the store: the store postgresql://" in node.log() or node.log().count(" is up: ") > 1,
        "the node to say that it waits, or to be up all the same",
    )
    assert "Traceback" not in node.log()
    ballast.unlink()
    go.touch()
    node.await_up(node.pid)
    later = node.enqueue("mark", path=str(runs))
    assert all(node.wait_job(job)["status"] == "done" for job in (running, *stored, *more, later))
    assert runs_of(runs) == sorted([*stored, *more, later]), "each stored job ran once, and no other did"
    until(lambda: node.get("/api/v1/health")[1]["status"] == "healthy", "all to be well again")


def backlog(node: Node, folder: Path) -> tuple[int, list[int], Path, Path]:
    """A job that runs until `go` exists, and 65 behind it that leave a line in `runs`."""
    runs, go = folder / "runs", folder / "go"
    running = node.enqueue("wait_for", path=str(go))
    node.wait_running(running)
    return running, [node.enqueue("mark", path=str(runs)) for _ in range(65)], runs, go


def runs_of(path: Path) -> list[int]:
    return sorted(int(line.split()[0]) for line in path.read_text().splitlines())


PRODUCER = """
import sys
from ostler import StoreBusy
from tests.work import mark
try:
    mark.enqueue(path=sys.argv[1])
except StoreBusy as error:
    assert "full" in str(error) or "No space left" in str(error), error
    print("StoreBusy")
else:
    print("stored")
"""


def enqueue_elsewhere(node: Node, runs: Path) -> str:
    """From another process, in Python."""
    env = {**node.producer_env, "OSTLER_STORE_PATIENCE": "0.5"}
    done = subprocess.run([sys.executable, "-c", PRODUCER, str(runs)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
