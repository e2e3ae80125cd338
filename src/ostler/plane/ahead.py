"""A worker's handshake that is begun while the node is asked for its consent: the client gets its answer when both are there.

It costs the worker a connection where the node says no, and saves every other client that time. Only a 101 counts; whatever else the
worker says is asked for again, in the ordinary way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ostler.plane.answer import Head, Headers
from ostler.plane.upstream import Link, Upstream


class Ahead:
    """One handshake. `then` is called once, when it has succeeded or failed; `take` gives what it has come to."""

    bodiless = passes = False
    is_sent = upgrades = True

    def __init__(self, address: str, head: bytes) -> None:
        self.head: Head | None = None
        self.is_over = False  # it has failed, or was given up
        self._request, self._rest = head, b""
        self._is_other = False  # the answer is not a 101
        self._link: Link | None = None
        self._then: Callable[[], None] | None = None
        upstream = Upstream(address)
        upstream.closed = True  # its connection is used once
        upstream.connect(self._connected)

    def _connected(self, found: Link | OSError) -> None:
        if isinstance(found, OSError):
            self._settle(over=True)
        elif self.is_over:
            found.abort()
        else:
            self._link = found
            found.begin(self, self._request)

    def then(self, callback: Callable[[], None]) -> None:
        """Call it when there is news; at once where there is."""
        if self.head is not None or self.is_over:
            callback()
        else:
            self._then = callback

    def take(self) -> tuple[Head, asyncio.Transport, bytes]:
        """The worker's answer, its connection, and what has come behind the answer. Only where there is a `head`."""
        assert self.head is not None
        assert self._link is not None
        link, self._link = self._link, None
        link.resume()
        return self.head, link.hand_over(), self._rest

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self.is_over, self._then = True, None
        if self._link is not None:
            self._link.abort()
            self._link = None

    def _settle(self, *, over: bool) -> None:
        self.is_over = self.is_over or over
        then, self._then = self._then, None
        if then is not None:
            then()

    # ---- the sink of the link

    def informed(self, status: int) -> None: ...

    def whole(self, data: bytes, start: int) -> None: ...

    def answered(self, head: Head) -> None:
        if head.status == 101:
            self.head = head
        else:
            self._is_other = True

    def body(self, data: bytes) -> None:
        if self.head is not None:
            self._rest += data

    def flush(self) -> None:
        if self._is_other:
            self.failed("not a 101")
        elif self.head is not None and self._link is not None:
            self._link.pause()  # the rest is read when there is somebody who takes it
            self._settle(over=False)

    def finished(self, trailers: Headers) -> None:
        self.failed("it closed the connection")

    def failed(self, reason: str) -> None:
        self.head = None
        if self._link is not None:
            self._link.abort()
            self._link = None
        self._settle(over=True)

    def full(self) -> None: ...

    def drained(self) -> None: ...
