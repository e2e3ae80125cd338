"""Sees what changes in the libraries and stores the scans that are due. A program of its own, kept running by the node.

A scan is due while a library's `wanted` is larger than its `done`. A change raises `wanted`, and a scan that began later lowers the
debt: what changes while a scan runs is found by the next one, and a scan whose job was lost is stored again.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select, update

from ostler.apps.music import app, catalogue, scan, tables
from ostler.apps.music.rules import Rules
from ostler.apps.music.tables import Tables, libraries

log = logging.getLogger("ostler.music")

_LOOK = 1.0  # seconds between two looks at the libraries
_PULSE = 2000  # ms between two looks at what is mounted
_BLIND = 300.0  # seconds between two scans of a library whose changes cannot be seen
_SHARE = 10  # a library that changes all the time is scanned at most this share of the time (1 of 10)


class Watcher:
    """A thread per library that is watched; what it sees is only that something has changed."""

    def __init__(self, root: bytes, settle: float) -> None:
        self.root, self._settle = root, settle
        self.error: str | None = None
        self._changed, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def changed(self) -> bool:
        """Whether something has changed since the last question."""
        if not self._changed.is_set():
            return False
        self._changed.clear()
        return True

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
                self._changed.set()  # whatever happened meanwhile

    def _follow(self, there: tuple[int, int] | None) -> None:
        from watchfiles import watch  # noqa: PLC0415

        if there is None:
            raise FileNotFoundError(f"{os.fsdecode(self.root)} is not there")
        wait = max(50, int(self._settle * 1000))
        options = {"step": min(wait, 500), "debounce": wait, "rust_timeout": _PULSE, "yield_on_timeout": True}
        for changes in watch(os.fsdecode(self.root), stop_event=self._stop, **options):  # type: ignore[arg-type]
            self.error = None
            if changes:
                self._changed.set()
            if _identity(self.root) != there:
                return

    def _wait(self, there: tuple[int, int] | None) -> None:
        """Until something else is there, or for a while."""
        until = time.monotonic() + _BLIND
        while not self._stop.wait(_PULSE / 1000) and _identity(self.root) == there:
            if there is not None and time.monotonic() > until:
                return


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

    def look(self, now: float) -> None:
        """One look: watchers as the rows want them, changes into the rows, scans that are due into the queue."""
        with self._tables.read() as connection:
            rows = {row.id: row for row in connection.execute(select(libraries))}
        self._keep(rows)
        for row in rows.values():
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
            values: dict[str, Any] = {}
            if watcher.changed():
                values["wanted"] = libraries.c.wanted + 1
            if watcher.error != row.watching:
                values["watching"] = watcher.error
            if values:
                with self._tables.write() as connection:
                    connection.execute(update(libraries).where(libraries.c.id == row.id).values(**values))

    def _is_due(self, row: Any, now: float) -> bool:
        """Whether a scan is to be stored: there was a change, or the last one is long ago."""
        since = now - self._stored.get(row.id, 0.0)
        if row.wanted > row.done:
            return since > max(self._rules.settle, _SHARE * (row.took or 0.0))
        old = row.scanned_at is not None and time.time() - row.scanned_at / 1000 > self._rules.rescan
        return bool(self._rules.rescan) and old and since > self._rules.rescan


def main() -> None:
    """Look until the node says goodbye."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
    watching = Watching(tables.here(), Rules.from_environment())
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
