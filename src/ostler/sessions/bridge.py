"""A WebSocket client of a worker that speaks plain TCP: what the worker says travels in binary frames. Standard library alone."""

from __future__ import annotations

import asyncio

from ostler.sessions import frames
from ostler.sessions.splice import Side, Splice

_PIECE = 65_536  # bytes in one frame at the most


class _Framed(Side):
    """The client: its frames are taken apart, and its pings answered."""

    def __init__(self, splice: Splice, transport: asyncio.Transport) -> None:
        super().__init__(splice, transport)
        self.unframed = frames.Unframed()

    def data_received(self, data: bytes) -> None:
        self.count += len(data)
        self.heard = self.splice.time()
        if self.splice.end is not None:  # it has its close frame, and answers with one: nothing can follow
            return
        try:
            carried, answers = self.unframed.feed(data)
        except frames.BadFrame as error:
            self.splice.finish("client", f"ostler: {error}", 1002)
            return
        if carried:
            self.active = self.heard
            self.other.write(carried)
        if answers and not self.is_full:  # else it would pile up: who takes nothing needs no answers
            self.write(answers)
        if self.unframed.closed is not None:
            self._close(*self.unframed.closed)

    def _close(self, code: int, text: str) -> None:
        self.write(frames.header(frames.CLOSE, 0) if code == frames.NO_CODE else frames.close(code, text))
        self.splice.finish("client", text, code, tell=False)


class _Framing(Side):
    """The worker: what it says is put into frames."""

    def data_received(self, data: bytes) -> None:
        self.count += len(data)
        self.heard = self.active = self.splice.time()
        if len(data) <= _PIECE:
            self.other.write(frames.header(frames.BINARY, len(data)) + data)
            return
        for at in range(0, len(data), _PIECE):
            piece = data[at : at + _PIECE]
            self.other.write(frames.header(frames.BINARY, len(piece)) + piece)


class Bridge(Splice):
    """A splice whose client speaks WebSocket and whose worker does not. A close frame is the end of the client's bytes."""

    def sides(self, client: asyncio.Transport, worker: asyncio.Transport) -> tuple[Side, Side]:
        return _Framed(self, client), _Framing(self, worker)

    def may_write(self) -> bool:
        return not self.client.transport.is_closing()  # each write is a frame

    def ended(self, side: Side) -> bool:
        if self.end is not None:
            side.transport.close()
        elif side is self.client:
            self.finish("client", "", frames.ABNORMAL, tell=False)
        else:
            self.finish("worker", "", 1000)
        return self.end is None
