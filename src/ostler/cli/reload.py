"""`ostler up --reload`: a node that is started anew whenever a file of the app changes. For development."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

_EVERY = 0.5  # seconds between two looks
_FINISH = 3.0  # seconds that running jobs get to finish; then they are stopped, and run again in the new node
_MOST = 20_000  # files that are watched
_SUFFIXES = (".py", ".toml", ".sql", ".html", ".js", ".css")
_SKIPPED = {"__pycache__", "node_modules", "site-packages"}

Seen = dict[str, tuple[int, int]]


def serve(arguments: Sequence[str], root: Path, data: Path) -> int:
    """Run `ostler up` with these arguments until it is told to end, anew after each change below `root`; the last exit code."""
    nodes: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def leave(number: int, _: FrameType | None) -> None:
        asked.append(number)
        if nodes and number != signal.SIGINT:  # a terminal sends Ctrl-C to both
            nodes[-1].send_signal(number)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    seen = snapshot(root, data)
    print(f"ostler: watching {len(seen)} files below {root}", flush=True)
    while True:
        node = subprocess.Popen([sys.executable, "-m", "ostler", "up", *arguments], preexec_fn=_with_parent)  # noqa: PLW1509
        nodes[:] = [node]
        changed = None
        while not asked and changed is None:
            _pause(node)
            now = snapshot(root, data)
            changed = difference(seen, now)
            seen = now
        if asked:
            return node.wait()
        print(f"ostler: {changed} has changed; restarting", flush=True)
        _end(node)
        if asked:
            return node.returncode


def snapshot(root: Path, data: Path) -> Seen:
    """Time and size of each file that matters."""
    found: Seen = {}
    for entry in _files(root, data):
        try:
            about = entry.stat()
        except OSError:
            continue
        found[entry.path] = (about.st_mtime_ns, about.st_size)
        if len(found) >= _MOST:
            break
    return found


def difference(before: Seen, now: Seen) -> str | None:
    """The name of a file that is new, gone or not the same; None where there is none."""
    for path in now.keys() | before.keys():
        if now.get(path) != before.get(path):
            return Path(path).name
    return None


def _files(root: Path, data: Path) -> Iterator[os.DirEntry[str]]:
    folders = [str(root)]
    while folders:
        try:
            entries = list(os.scandir(folders.pop()))
        except OSError:
            continue
        if any(entry.name == "pyvenv.cfg" for entry in entries):
            continue  # a virtual environment
        for entry in entries:
            if entry.name.startswith(".") or entry.name in _SKIPPED or entry.path == str(data):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            elif entry.name.endswith(_SUFFIXES):
                yield entry


def _with_parent() -> None:
    """(in the new process) Leave when the watching process dies, however it dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _pause(node: subprocess.Popen[bytes]) -> None:
    """Until the next look; less where the node ends meanwhile, for then it is only looked at the files."""
    if node.poll() is None:
        try:
            node.wait(_EVERY)
        except subprocess.TimeoutExpired:
            return
        print("ostler: the node has ended; waiting for a change", flush=True)
    else:
        time.sleep(_EVERY)


def _end(node: subprocess.Popen[bytes]) -> None:
    """In order; the second signal stops what still runs."""
    while node.poll() is None:
        node.terminate()
        try:
            node.wait(_FINISH)
        except subprocess.TimeoutExpired:
            continue
