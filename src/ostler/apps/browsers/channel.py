"""The way by which connections are lent to a driver: Node's own channel, the only one on which its programs can be passed any.

Those who lend (the relay, the worker's own door) connect to a Unix socket that only the worker's user can reach. What they say is passed on
as it is (sessions/lending.py), and what the driver says goes to the lender of that session.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from pathlib import Path
from typing import Any

from ostler.sessions.passage import Passage

_LENDERS = 16  # at once; there is one, or two while a relay is being replaced, and the door


class Channel:
    """Opened before the driver is started, which inherits `theirs` and the variables."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._loop = asyncio.get_running_loop()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(self.path)
        self._listener.listen(_LENDERS)
        ours, self.theirs = socket.socketpair()
        self._lenders: set[Passage] = set()
        self._by_session: dict[str, Passage] = {}
        self._waiting: deque[tuple[Any, int | None]] = deque()  # for the driver to say that it has the last connection
        self._passing: list[Any] | None = None  # the message with which a connection is on its way to the driver
        self._is_closed = False
        self._driver = Passage(ours, self._said, self.close, takes_files=False)
        self._loop.add_reader(self._listener, self._accept)

    @property
    def variables(self) -> dict[str, str]:
        """By which Node finds its channel."""
        return {"NODE_CHANNEL_FD": str(self.theirs.fileno()), "NODE_CHANNEL_SERIALIZATION_MODE": "json"}

    def inherited(self) -> None:
        """The driver has been started."""
        self.theirs.close()

    def close(self) -> None:
        """Also when the driver has gone."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self.theirs.close()
        for passage in (self._driver, *self._lenders):
            passage.close()
        for _, file in self._waiting:
            if file is not None:
                os.close(file)
        self._waiting.clear()

    # ---- lenders

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        if len(self._lenders) >= _LENDERS:
            sock.close()
            return
        lender = Passage(sock, lambda message: self._lends(lender, message), lambda: self._left(lender))
        self._lenders.add(lender)

    def _left(self, lender: Passage) -> None:
        """The end of the bytes' own way tells the driver of it."""
        self._lenders.discard(lender)
        self._by_session = {s: passage for s, passage in self._by_session.items() if passage is not lender}

    def _lends(self, lender: Passage, message: Any) -> None:
        match message:
            case ["take", str(session), *_]:
                self._by_session[session] = lender
                if lender.files:
                    self._pass(message, lender.files.popleft())
                else:  # it was lost on the way: this process may have no more files
                    self._refuse(message)
            case ["over", str(session), *_]:
                self._by_session.pop(session, None)
            case ["go" | "back", *_]:
                self._pass(message, None)

    # ---- the driver

    def _pass(self, message: Any, file: int | None) -> None:
        """One connection at a time: Node counts on that, and says when it has it."""
        if self._passing is not None:
            self._waiting.append((message, file))
        elif file is None:
            self._driver.send(message)
        else:
            self._passing = message
            self._driver.send({"cmd": "NODE_HANDLE", "type": "net.Socket", "msg": message}, file)
            os.close(file)

    def _said(self, message: Any) -> None:
        match message:
            case {"cmd": "NODE_HANDLE_ACK" | "NODE_HANDLE_NACK" as verb} if self._passing is not None:
                passed, self._passing = self._passing, None
                if verb == "NODE_HANDLE_NACK":
                    self._refuse(passed)
                while self._waiting and self._passing is None:
                    self._pass(*self._waiting.popleft())
            case [str(verb), str(session), *_] if (lender := self._by_session.get(session)) is not None:
                if verb in ("gave", "no"):
                    del self._by_session[session]
                lender.send(message)

    def _refuse(self, message: list[Any]) -> None:
        """The driver has not got it."""
        if (lender := self._by_session.pop(message[1], None)) is not None:
            lender.send(["no", *message[1:3]])
