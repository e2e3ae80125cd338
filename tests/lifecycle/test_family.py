"""Finding and ending everything that came out of a worker."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time

from ostler.lifecycle import family
from tests.harness import gone, until

_TREE = """
import os, subprocess, sys, time
kids = [subprocess.Popen(["sleep", "300"], start_new_session=bool(i)) for i in range(2)]
# a double fork into a session of its own: its parent is gone, only the mark tells
middle = subprocess.run([sys.executable, "-c", "import subprocess; print(subprocess.Popen(['sleep', '300'], start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"], capture_output=True, text=True)
# without the mark, but still a descendant
bare = subprocess.Popen(["sleep", "300"], env={}, start_new_session=True, executable="/bin/sleep")
print(*[k.pid for k in kids], middle.stdout.strip(), bare.pid, flush=True)
time.sleep(300)
"""


def _tree(mark: str) -> tuple[subprocess.Popen[str], list[int]]:
    env = {**os.environ, family.VARIABLE: mark}
    root = subprocess.Popen(
        [sys.executable, "-c", _TREE], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert root.stdout is not None
    return root, [int(p) for p in root.stdout.readline().split()]


def test_a_family_is_found_and_ended_whatever_it_did_to_hide() -> None:
    token = secrets.token_hex(4)
    root, kids = _tree(f"{token}/worker:a:0/1/")
    other, other_kids = _tree(f"{token}/worker:a:0/11/")
    try:
        assert len(kids) == 4
        assert family.members(f"{token}/worker:a:0/1/") == {root.pid, *kids}
        family.kill(f"{token}/worker:a:0/1/")
        root.wait()
        until(lambda: all(gone(pid) for pid in kids), "the family to be gone")
        assert not any(gone(pid) for pid in [other.pid, *other_kids])
    finally:
        family.kill(f"{token}/")
        for process in (root, other):
            process.wait()
            process.stdout.close()


def test_one_without_mark_and_parent_is_found_by_the_session_of_its_worker() -> None:
    token = secrets.token_hex(4)
    code = "import subprocess, time; subprocess.run(['/bin/sh', '-c', 'sleep 300 >/dev/null 2>&1 & echo $!'], env={}); time.sleep(300)"
    root = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, family.VARIABLE: f"{token}/worker:a:0/1/"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert root.stdout is not None
    orphan = int(root.stdout.readline())
    try:
        until(lambda: family.members(f"{token}/") == {root.pid, orphan}, "both to be found by the mark alone")
        family.kill(f"{token}/")
        until(lambda: gone(orphan), "the orphan to be gone")
    finally:
        root.kill()
        root.wait()
        root.stdout.close()


def test_a_guard_ends_all_families_when_its_node_goes() -> None:
    token = secrets.token_hex(4)
    root, kids = _tree(f"{token}/worker:a:0/1/")
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", family.__file__, f"{token}/"], stdin=subprocess.PIPE, start_new_session=True
    )
    assert guard.stdin is not None
    assert not gone(root.pid)
    guard.stdin.close()
    assert guard.wait(30) == 0
    root.wait()
    root.stdout.close()
    assert all(gone(pid) for pid in kids)


def test_a_pid_alone_is_no_identity() -> None:
    started = family.start_time(os.getpid())
    assert family.is_alive(os.getpid(), started)
    assert not family.is_alive(os.getpid(), started + 1)
    assert not family.is_alive(None, started)
    child = subprocess.Popen(["true"])
    born = family.start_time(child.pid)
    until(lambda: gone(child.pid), "the child to end")
    assert not family.is_alive(child.pid, born)  # a zombie does not live
    child.wait()


_ = time
