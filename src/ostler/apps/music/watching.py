"""Sees what changes in the libraries and stores the scans that are due. A program of its own, kept running by the node.

A scan is due while a library's `wanted` is larger than its `done`. A change raises `wanted`, and a scan that began later lowers the
debt: what changes while a scan runs is found by the next one, and a scan whose job was lost is stored again.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import select, update

from ostler.apps.music import app, catalogue, opening, scan
from ostler.apps.music.rules import Rules
from ostler.apps.music.tables import Tables, libraries

log = logging.getLogger("ostler.music")

_LOOK = 1.0  # seconds between two looks at the libraries
_PULSE = 2000  # ms between two looks at what is mounted
_BLIND = 300.0  # seconds between two scans of a library whose changes cannot be seen
_PATHS = 1_000  # that have changed at once: if more have, all is looked at
_SIBLINGS = 20  # … of one directory
_SHARE = 10  # a library that changes all the time is scanned at most this share of the time (1 of 10)


class Watcher:
    """A thread per library that is watched. What it sees is where something has changed; when in doubt, anywhere."""

    def __init__(self, root: bytes, settle: float) -> None:
        self.root, self._settle = root, settle
        self.error: str | None = None
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._changed: set[bytes] = set()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def changed(self) -> set[bytes]:
        """The paths at or below which something has changed since the last question; an empty one is the whole library."""
        with self._lock:
            found, self._changed = self._changed, set()
        return fewer(found)

    def _saw(self, paths: Iterable[bytes]) -> None:
        with self._lock:
            self._changed.update(paths)
            if len(self._changed) > _PATHS:
                self._changed = {b""}

    def stop(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        """Until it is stopped: watch what is there, and begin anew when something else is mounted or unmounted there."""
        while not self._stop.is_set():
            there = _identity(self.root)
            try:
                self._follow(there)
            except Exception as error:  # noqa: BLE001  not mounted, too many directories for inotify: the node goes on
                self.error = f"changes are not seen: {error}"[:500]
                self._wait(there)
            if _identity(self.root) is not None:
                self._saw([b""])  # whatever happened meanwhile

    def _follow(self, there: tuple[int, int] | None) -> None:
        from watchfiles import watch  # noqa: PLC0415

        if there is None:
            raise FileNotFoundError(f"{os.fsdecode(self.root)} is not there")
        wait = max(50, int(self._settle * 1000))
        options = {"step": min(wait, 500), "debounce": wait, "rust_timeout": _PULSE, "yield_on_timeout": True}
        # The default filter leaves out what programmers do not want to see.
        for changes in watch(os.fsdecode(self.root), stop_event=self._stop, watch_filter=None, **options):  # type: ignore[arg-type]
            self.error = None
            self._saw(path for _, name in changes if (path := within(self.root, name)) is not None)
            if _identity(self.root) != there:
                return

    def _wait(self, there: tuple[int, int] | None) -> None:
        """Until something else is there, or for a while."""
        until = time.monotonic() + _BLIND
        while not self._stop.wait(_PULSE / 1000) and _identity(self.root) == there:
            if there is not None and time.monotonic() > until:
                return


def within(root: bytes, name: str) -> bytes | None:
    """A path that has changed, from the root of its library; None where it is a file of ours.

    Names that are no UTF-8 come with U+FFFD in them: then it is the directory that is known to have changed.
    """
    start = os.fsdecode(root).rstrip("/") + "/"
    if not name.startswith(start):
        return b""
    parts = name[len(start) :].split("/")
    if parts[-1].startswith(".ostler-") or parts[-1].endswith(".ostler.json"):
        return None
    return os.fsencode("/".join(itertools.takewhile(lambda part: "\ufffd" not in part, parts)))


def fewer(paths: set[bytes]) -> set[bytes]:
    """The same in fewer paths: a directory in which many files have changed stands for them, and a path for what is below it."""
    counts = Counter(map(_parent, paths))
    found = {_parent(path) if counts[_parent(path)] > _SIBLINGS else path for path in paths}
    return {b""} if b"" in found else {path for path in found if not _is_covered(path, found)}


def _is_covered(path: bytes, by: set[bytes]) -> bool:
    while path := _parent(path):
        if path in by:
            return True
    return False


def _parent(path: bytes) -> bytes:
    return path.rpartition(b"/")[0]


def _identity(root: bytes) -> tuple[int, int] | None:
    """What is mounted there; None: nothing."""
    try:
        facts = os.stat(root)  # noqa: PTH116  bytes
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


class Watching:
    """The libraries, looked at every second."""

    def __init__(self, opened: Tables, rules: Rules) -> None:
        self._tables, self._rules = opened, rules
        self._watchers: dict[int, Watcher] = {}
        self._stored: dict[int, float] = {}
        self._aged: dict[int, float] = {}

    def look(self, now: float) -> None:
        """One look: watchers as the rows want them, changes into the rows, scans that are due into the queue."""
        with self._tables.read() as connection:
            rows = {row.id: row for row in connection.execute(select(libraries))}
        self._keep(rows)
        for row in rows.values():
            if self._is_old(row, now):
                self._aged[row.id] = now
                catalogue.want_scan(self._tables, row.id)
            if self._is_due(row, now):
                self._stored[row.id] = now
                scan.enqueue(library=row.id)

    def _keep(self, rows: Mapping[int, Any]) -> None:
        for library in [*self._watchers]:
            if library not in rows or not rows[library].watch:
                self._watchers.pop(library).stop()
        for row in rows.values():
            if not row.watch:
                continue
            watcher = self._watchers.get(row.id)
            if watcher is None:
                watcher = self._watchers[row.id] = Watcher(row.root, self._rules.settle)
                catalogue.want_scan(self._tables, row.id)  # what changed while nobody watched
            if paths := watcher.changed():
                catalogue.want_scan(self._tables, row.id, paths)
            if watcher.error != row.watching:
                with self._tables.write() as connection:
                    told = {"watching": watcher.error}
                    connection.execute(update(libraries).where(libraries.c.id == row.id).values(told))

    def _is_due(self, row: Any, now: float) -> bool:
        """Whether a scan is to be stored, of what has changed."""
        since = now - self._stored.get(row.id, 0.0)
        return row.wanted > row.done and since > max(self._rules.settle, _SHARE * (row.took or 0.0))

    def _is_old(self, row: Any, now: float) -> bool:
        """Whether the whole library was looked at long ago, and nobody has tried since."""
        age = min(time.time() - (row.scanned_at or time.time() * 1000) / 1000, now - self._aged.get(row.id, -math.inf))
        return bool(self._rules.rescan) and age > self._rules.rescan


def main() -> None:
    """Look until the node says goodbye."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    watching = Watching(opening.here(), Rules.from_environment())
    app.producer.store()
    while True:
        began = time.monotonic()
        try:
            watching.look(began)
        except Exception:  # the next look may do better
            log.exception("the libraries could not be looked at")
        time.sleep(_LOOK)


if __name__ == "__main__":
    main()
