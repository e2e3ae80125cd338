"""The live view of sessions, as the worker serves it: JPEG frames over HTTP on a Unix socket. Standard library alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from ostler.sessions.handle import Session

log = logging.getLogger("ostler.sessions")

BOUNDARY = "ostler-frame"
_VIEWERS = 8  # at once, of one worker
_HEAD = 5.0  # seconds for a request's head
_LOOK = 0.5  # seconds between two looks whether the session is still there


class Views:
    """Answers `GET /view/SESSION` with the frames of `code.view(session)`, as fast as the viewer takes them."""

    def __init__(self, code: Any, sessions: Mapping[str, Session], path: str) -> None:
        self._code, self._sessions, self._path = code, sessions, path
        self._server: asyncio.Server | None = None
        self._viewers = 0

    async def start(self) -> str:
        """Listen; returns the path of the socket."""
        self._server = await asyncio.start_unix_server(self._serve, self._path, limit=16_384)
        return self._path

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD):
                head = await reader.readuntil(b"\r\n\r\n")
            session = self._sessions.get(head.split(b" ")[1].decode("latin-1").rpartition("/")[2])
            if session is None or self._viewers >= _VIEWERS:
                status = b"404 Not Found" if session is None else b"429 Too Many Requests"
                writer.write(b"HTTP/1.1 %b\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % status)
                return
            self._viewers += 1
            try:
                await self._while_watched(session, reader, asyncio.ensure_future(self._stream(session, writer)))
            finally:
                self._viewers -= 1
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, IndexError):
            pass  # the viewer has gone, or said nothing that could be answered
        except Exception:
            log.exception("a live view failed")
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _while_watched(self, session: Session, reader: asyncio.StreamReader, stream: asyncio.Task[None]) -> None:
        """Until the viewer or the session is gone, also where nothing changes that could be shown."""
        left = asyncio.ensure_future(reader.read(1))
        try:
            while not (stream.done() or left.done()) and session.id in self._sessions:
                await asyncio.wait((stream, left), timeout=_LOOK, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
            stream.cancel()
            await asyncio.wait((stream,))
        if not stream.cancelled():
            stream.result()

    async def _stream(self, session: Session, writer: asyncio.StreamWriter) -> None:
        kind = f"multipart/x-mixed-replace; boundary={BOUNDARY}"
        part = f"--{BOUNDARY}\r\ncontent-type: image/jpeg\r\n\r\n".encode()
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\nconnection: close\r\n\r\n".encode() + part)
        frames = self._code.view(session)
        try:
            async for frame in frames:
                writer.write(frame + b"\r\n" + part)  # Chromium shows a picture when the head of the next one is there
                await writer.drain()  # the next frame is asked for when this one is taken
        finally:
            await frames.aclose()
