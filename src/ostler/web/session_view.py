"""The live view of a session: JPEG frames, passed on from its worker's socket as fast as the viewer takes them.

Nothing is kept here: a slow viewer holds up its own connection to the worker, which then makes fewer frames for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.responses import Response

from ostler.errors import Conflict, Unreachable
from ostler.sessions.shown import Sessions
from ostler.web.errors import failure
from ostler.web.stream import EventStream

_MOST = 16  # viewers of a node at once
_CONNECT = 5.0  # seconds for the worker to answer
_LOOK = 2.0  # seconds after which a view without a new frame looks whether its session is still there
_STALLED = 30.0  # seconds that a viewer may take for a piece while others want its place
_HEAD = 16_384  # bytes
_PIECE = 65_536
_KIND = re.compile(r"multipart/x-mixed-replace; ?boundary=[\w.-]{1,70}")


class _Viewer:
    """One who watches. `since`: it has not taken a piece that it was given then; None: it waits for the next one."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.since: float | None = None

    def leave(self) -> None:
        self._writer.transport.abort()  # this ends the loop of frames, too


class Views:
    """Those who watch a session of this node."""

    def __init__(self) -> None:
        self._coming = 0
        self._viewers: set[_Viewer] = set()

    async def watch(self, sessions: Sessions, session: str, socket: str) -> Response:
        """The answer to one of them."""
        self._drop_stalled()
        if len(self._viewers) + self._coming >= _MOST:
            return failure(429, "TOO_MANY_VIEWERS", f"{_MOST} viewers watch sessions of this node, and no more can")
        self._coming += 1
        try:
            reader, writer, kind = await _open(session, socket)
        finally:
            self._coming -= 1
        viewer = _Viewer(writer)
        self._viewers.add(viewer)

        def gone() -> None:
            self._viewers.discard(viewer)
            viewer.leave()

        return EventStream(_frames(sessions, session, reader, viewer), gone, kind)

    def _drop_stalled(self) -> None:
        """Where all places are taken, those who do not read lose theirs."""
        if len(self._viewers) + self._coming >= _MOST:
            before = time.monotonic() - _STALLED
            for viewer in [v for v in self._viewers if v.since is not None and v.since <= before]:
                self._viewers.discard(viewer)
                viewer.leave()


async def _frames(
    sessions: Sessions, session: str, reader: asyncio.StreamReader, viewer: _Viewer
) -> AsyncIterator[bytes]:
    """What the worker sends, until it or the session ends, or the viewer has gone."""
    with contextlib.suppress(OSError):
        while True:
            try:
                async with asyncio.timeout(_LOOK):
                    piece = await reader.read(_PIECE)
            except TimeoutError:  # nothing has changed
                if sessions.view_socket(session) is None:
                    return
                continue
            if not piece:
                return
            viewer.since = time.monotonic()
            yield piece
            viewer.since = None


async def _open(session: str, socket: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, str]:
    """Ask the worker for its frames; returns where they come from and of which kind they are."""
    writer = None
    try:
        async with asyncio.timeout(_CONNECT):
            reader, writer = await _connect(Path(socket))
            writer.write(f"GET /view/{session} HTTP/1.0\r\n\r\n".encode())
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        status = head.split(" ")[1]
        if status in ("404", "429"):
            why = "it has just ended" if status == "404" else "too many watch sessions of its worker"
            raise Conflict(f"session {session} cannot be watched now: {why}")
        kind = _KIND.search(head)
        if status != "200" or kind is None:
            raise Unreachable(f"the worker of session {session} answered {status} instead of pictures; see its log")
        return reader, writer, kind[0]
    except BaseException as error:
        if writer is not None:
            writer.transport.abort()
        if isinstance(error, TimeoutError | OSError | EOFError | asyncio.LimitOverrunError | IndexError):
            raise Unreachable(f"the worker of session {session} does not show it ({error or 'no answer'})") from error
        raise


async def _connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """By its directory: the path of a socket may have 107 bytes, that of a data directory more."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, folder)
        return await asyncio.open_unix_connection(f"/proc/self/fd/{folder}/{path.name}", limit=_HEAD)
