"""`ostler top`: the node, live in the terminal."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from typing import Any

import click
from rich.console import Console
from rich.control import Control
from rich.screen import Screen

from ostler.cli import client, show
from ostler.cli.board import SPANS, Board
from ostler.cli.options import where
from ostler.cli.picture import picture
from ostler.cli.stream import follow
from ostler.config import Settings
from ostler.errors import OstlerError
from ostler.store import now_ms

_FRAME = 0.15  # seconds between two pictures, at least
_ASK = 1.0  # … between two questions beside the stream
_COUNTERS = 10.0  # … between two readings of the counters, which the stream carries on meanwhile


@click.command()
@click.option("--once", is_flag=True, help="Print once and exit.")
@click.option(
    "--span", type=click.Choice(list(SPANS)), default="10m", show_default=True, help="The time span of the figures."
)
@where
def top(known: Settings, once: bool, span: str) -> None:
    """Show health, queues, workers, running jobs and incidents live in the terminal. Press q to quit."""
    feed = Feed(known, span)
    console = show.console(160, soft_wrap=False)
    with contextlib.suppress(KeyboardInterrupt):
        feed.start()
        if once or not console.is_terminal or console.is_dumb_terminal:
            with feed.lock:
                console.print(picture(feed.board, now_ms(), console.width))
            return
        feed.keep()
        while _watch(feed, console):
            signal.raise_signal(signal.SIGSTOP)


class Feed:
    """Keeps the board, in a thread; rings where there is news."""

    def __init__(self, known: Settings, span: str) -> None:
        self._known = known
        self.board, self.lock = Board(span), threading.Lock()
        self._begun = threading.Event()
        self.error: Exception | None = None
        self.news, self._bell = os.pipe()
        os.set_blocking(self.news, False)
        os.set_blocking(self._bell, False)

    def ring(self, *_: Any) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._bell, b".")

    def start(self) -> None:
        """Come back with the board as it is now."""
        threading.Thread(target=self._listen, daemon=True).start()
        self._begun.wait()
        if self.error is not None:
            raise self.error
        self._ask()

    def keep(self) -> None:
        """Ask on, in a thread of its own: a stream that is not read on tells what was long ago."""
        threading.Thread(target=self._keep_asking, daemon=True).start()

    def _listen(self) -> None:
        try:
            for event in follow(self._known, "*", lost=self._lost):
                if event is not None:
                    with self.lock:
                        self.board.apply(event.body)
                    if event.is_live:
                        self._begun.set()
                    self.ring()
        except Exception as error:
            self.error = error  # for whoever shows the board
            self._begun.set()
            self.ring()

    def _lost(self, is_lost: bool) -> None:
        with self.lock:
            self.board.lost = is_lost
        self.ring()

    def _ask(self) -> None:
        """What the stream does not tell: counters of the past, and the running jobs where some were missed."""
        if self.board.counters_due:
            found = client.request(self._known, "GET", f"/api/v1/stats?span={self.board.span}")
            with self.lock:
                self.board.counters(found)
        if self.board.jobs_missed:
            with self.lock:
                self.board.relist()
            try:
                found = client.request(self._known, "GET", "/api/v1/jobs?status=processing&limit=200")
            except OstlerError:
                self.board.jobs_missed = True
                raise
            with self.lock:
                self.board.listed(found["jobs"])

    def _keep_asking(self) -> None:
        read = time.monotonic()
        while True:
            with contextlib.suppress(OstlerError):  # it is asked again, and the stream tells that the node is gone
                self._ask()
            time.sleep(_ASK)
            if time.monotonic() - read > _COUNTERS:
                read, self.board.counters_due = time.monotonic(), True


@contextlib.contextmanager
def _terminal(console: Console) -> Iterator[list[int]]:
    """The whole screen, and where keys come from as they are pressed. All is as before afterwards, however it ends."""
    keys = [sys.stdin.fileno()] if sys.stdin.isatty() else []
    before = [termios.tcgetattr(fd) for fd in keys]
    try:
        for fd in keys:
            tty.setcbreak(fd)
        with console.screen(hide_cursor=True):
            try:
                yield keys
            finally:
                console.clear()  # after a resize some terminals (tmux) leave parts of it behind
    finally:
        for fd, mode in zip(keys, before, strict=True):
            termios.tcsetattr(fd, termios.TCSADRAIN, mode)


def _watch(feed: Feed, console: Console) -> bool:
    """Show the board until somebody quits; True when it is only laid aside (Ctrl-Z)."""
    laid_aside: list[int] = []

    def lay_aside(number: int, _: Any) -> None:
        laid_aside.append(number)
        feed.ring()

    signal.signal(signal.SIGWINCH, feed.ring)
    signal.signal(signal.SIGTSTP, lay_aside)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with _terminal(console) as keys:
        while feed.error is None:
            _draw(feed, console)
            ready = select.select(keys, [], [], _FRAME)[0] or select.select([*keys, feed.news], [], [], 1.0)[0]
            if laid_aside:
                return True
            for typed in (os.read(fd, 64) for fd in ready if fd in keys):
                if not typed or b"q" in typed.lower():
                    return False
            with contextlib.suppress(BlockingIOError):
                os.read(feed.news, 65_536)
    raise feed.error


def _draw(feed: Feed, console: Console) -> None:
    with feed.lock:
        if not (feed.board.is_live or feed.board.lost):
            return  # between a resync and the state that follows
        shown = picture(feed.board, now_ms(), *console.size)
    with console:  # one write
        console.control(Control.home())
        console.print(Screen(shown), end="")
