"""Requests of the plane's own: for routes that read an answer before they give theirs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Self

from ostler.plane.answer import Head, Headers
from ostler.plane.upstream import Link, Upstream

_HIGH = 262_144  # bytes of an answer that wait for their reader


class BadUpstream(Exception):
    """No answer, or only the beginning of one. `sent`: the request may have been acted on."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(reason)
        self.sent = sent


class Answer:
    """The answer to `ask`. Close it (or leave its block) before its end to cancel the call."""

    upgrades, is_sent, passes = False, True, False

    def __init__(self, *, bodiless: bool) -> None:
        self.bodiless = bodiless
        self.head: Head | None = None
        self._link: Link | None = None
        self._pieces: deque[bytes] = deque()
        self._size = 0
        self._ended, self._reason = False, ""
        self._news = asyncio.Event()

    @property
    def status(self) -> int:
        assert self.head is not None
        return self.head.status

    @property
    def headers(self) -> Headers:
        assert self.head is not None
        return self.head.headers

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes; raises BadUpstream when it breaks off."""
        while True:
            while self._pieces:
                piece = self._pieces.popleft()
                self._size -= len(piece)
                if self._size < _HIGH and self._link is not None:
                    self._link.resume()
                yield piece
            if self._reason:
                raise BadUpstream(self._reason, sent=True)
            if self._ended:
                return
            await self._wait()

    async def read(self, limit: int) -> bytes:
        """The whole body; raises BadUpstream when it is larger than the limit."""
        found = bytearray()
        async for piece in self.chunks():
            found += piece
            if len(found) > limit:
                self.close()
                raise BadUpstream(f"its answer has more than {limit} bytes", sent=True)
        return bytes(found)

    def close(self) -> None:
        if self._link is not None and not self._ended:
            self._link.abort()
        self._link, self._ended = None, True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def begin(self, link: Link, data: bytes) -> None:
        """Send, and wait for the head of the answer."""
        self._link = link
        link.begin(self, data)
        try:
            while self.head is None and not self._reason:
                await self._wait()
        except BaseException:
            self.close()
            raise
        if self.head is None:
            raise BadUpstream(self._reason, sent=True)

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()

    # ---- the sink of its link

    def informed(self, status: int) -> None: ...

    def whole(self, data: bytes, start: int) -> None: ...

    def answered(self, head: Head) -> None:
        self.head = head
        self._news.set()

    def body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._size += len(data)
        if self._size > _HIGH and self._link is not None:
            self._link.pause()

    def flush(self) -> None:
        self._news.set()

    def finished(self, trailers: Headers) -> None:
        self._link, self._ended = None, True
        self._news.set()

    def failed(self, reason: str) -> None:
        self._link, self._reason = None, reason
        self._news.set()

    def full(self) -> None: ...

    def drained(self) -> None: ...


async def ask(upstream: Upstream, method: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> Answer:
    """Send a request of our own; returns when the head of the answer is here. Raises BadUpstream."""
    link = upstream.take()
    if link is None:
        found = await upstream.open()
        if isinstance(found, OSError):
            raise BadUpstream(f"cannot connect: {found.strerror or found}", sent=False)
        link = found
    lines = [f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n", *(f"{n}: {v}\r\n" for n, v in headers.items())]
    lines.append(f"content-length: {len(body)}\r\n\r\n")
    answer = Answer(bodiless=method == "HEAD")
    await answer.begin(link, "".join(lines).encode() + body)
    return answer
