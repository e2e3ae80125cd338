"""`ostler up --reload`: a node that is started anew whenever a file of the app changes. For development.

A child loads and checks the app first (`ostler up --imports`). The node that runs is stopped only when that went well, and only the files that
the app imported from its own directory are watched.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType

_EVERY = 0.2  # seconds between two looks
_FINISH = 3.0  # seconds that running jobs get to finish; then they are stopped, and run again in the new node
_MOST = 20_000  # files that are looked at
_SKIPPED = {"__pycache__", "node_modules", "site-packages"}

Seen = dict[str, tuple[int, int] | None]


def serve(arguments: Sequence[str], root: Path, data: Path, settings: Path) -> int:
    """Run `ostler up` with these arguments until it is told to end, anew after each change of the app; the last exit code."""
    nodes: list[subprocess.Popen[bytes]] = []
    asked: list[int] = []

    def leave(number: int, _: FrameType | None) -> None:
        asked.append(number)
        if nodes and number != signal.SIGINT:  # a terminal sends Ctrl-C to both
            nodes[-1].send_signal(number)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    while not asked:
        seen = look([*below(root, data), str(settings)])
        if imported := _imports(arguments):
            for node in nodes:
                _end(node)
            if asked:
                break
            seen = {path: about for path, about in seen.items() if path in imported or path == str(settings)}
            print(f"ostler: watching {len(seen)} files for changes", flush=True)
            nodes[:] = [subprocess.Popen(_up(*arguments), preexec_fn=_with_parent)]  # noqa: PLW1509
        elif not asked:
            running = bool(nodes) and nodes[-1].poll() is None
            then = "the node keeps running the old code" if running else "no node is running"
            print(f"ostler: the app does not load; {then}. Waiting for a change", flush=True)
        _await_change(seen, nodes, asked, root if not imported else None, data)
    return nodes[-1].wait() if nodes else 128 + asked[0]


def _up(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "ostler", "up", *arguments]


def _imports(arguments: Sequence[str]) -> set[str]:
    """Load and check the app in a process of its own; the files of its modules. None of them: it does not load, as the process has said."""
    done = subprocess.run(_up("--imports", *arguments), stdout=subprocess.PIPE, check=False, preexec_fn=_with_parent)
    return set(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else set()


def imports() -> str:
    """(in that process) The files of all modules that are loaded, as one line of JSON."""
    files = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
    return json.dumps(sorted({os.path.realpath(file) for file in files if file}))


def _await_change(
    seen: Seen, nodes: list[subprocess.Popen[bytes]], asked: list[int], root: Path | None, data: Path
) -> None:
    """Until one of the files has changed, or, below `root` where given, one was added or is gone."""
    ended = not nodes or nodes[-1].poll() is not None
    while not asked:
        now = look([*seen, *(below(root, data) if root else ())])
        if changed := difference(seen, now):
            print(f"ostler: {changed} has changed", flush=True)
            return
        if not ended and nodes[-1].poll() is not None:
            ended = True
            print(f"ostler: the node has ended ({ended_by(nodes[-1].returncode)}); waiting for a change", flush=True)
        time.sleep(_EVERY)


def ended_by(code: int) -> str:
    """An exit code of a process in words."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def look(paths: Iterable[str]) -> Seen:
    """Time and size of each file; None: it is not there."""
    found: Seen = {}
    for path in paths:
        try:
            about = Path(path).stat()
        except OSError:
            found[path] = None
        else:
            found[path] = (about.st_mtime_ns, about.st_size)
    return found


def difference(before: Seen, now: Seen) -> str | None:
    """The name of a file that is new, gone or not the same; None where there is none."""
    for path in now.keys() | before.keys():
        if now.get(path) != before.get(path):
            return Path(path).name
    return None


def below(root: Path, data: Path) -> list[str]:
    """The Python files below a directory, without those of virtual environments and hidden directories."""
    return [path for path, _ in zip(_files(root, data), range(_MOST), strict=False)]


def _files(root: Path, data: Path) -> Iterator[str]:
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
            elif entry.name.endswith(".py"):
                yield entry.path


def _with_parent() -> None:
    """(in the new process) Leave when the watching process dies, however it dies."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _end(node: subprocess.Popen[bytes]) -> None:
    """In order; the second signal stops what still runs."""
    if node.poll() is None:
        print(f"ostler: restarting the node; running jobs get {_FINISH:g} s to finish", flush=True)
    while node.poll() is None:
        node.terminate()
        try:
            node.wait(_FINISH)
        except subprocess.TimeoutExpired:
            continue
