"""Clients' own connections, lent by the plane: who calls one model again and again is answered by its worker. Standard library, Python 3.9.

The plane keeps its end of such a connection and does not read it meanwhile. A guest takes requests whose head is the one that the plane has
judged, byte for byte but for the length, and whose body names this model. Whatever else comes goes back to the plane with the connection,
unread, and so does a guest that rests for a while, or that the plane wants back.

What a guest is at stands in a cell of memory that the plane can read: so it knows, when the worker dies, whether a request was lost with it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import socket
import struct
import threading
import time
from collections import deque
from typing import Any

from ostler.calls.connection import Connection, HungUp
from ostler.calls.request import Request

PATH = "/guests"  # where the plane asks for a channel
WELCOME = b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: ostler-guests\r\n\r\n"
# What it is at, since when, the number of its call, and how many bytes it will have sent with the present answer (0: nobody knows).
CELL = struct.Struct("=QdQQ")
CELLS = 128
RESTS, READS, ANSWERS = 0, 1, 2  # nothing was read; something was, and nothing is answered; an answer is being written
TIRED = 0.05  # seconds after which a guest that asks nothing goes back

MODEL = re.compile(rb'\s*\{\s*"model"\s*:\s*("(?:[^"\\]|\\.)*")')  # the model's name as the first key of a body
_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: (\d{1,12})\r\n")
_LONGEST_HEAD = 4096
_LONGEST_BODY = 262_144
_TOLD = 0.1  # seconds between two reports
_PIECE = 65_536  # bytes of an answer in one message
_SIZE = struct.Struct(">I")


def framed(frame: list[Any]) -> bytes:
    """A message, as it travels."""
    data = json.dumps(frame).encode()
    return _SIZE.pack(len(data)) + data


class Frames:
    """Messages out of bytes."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> list[list[Any]]:
        data, found, at = self._data + data, [], 0
        while len(data) - at >= _SIZE.size:
            end = at + _SIZE.size + _SIZE.unpack_from(data, at)[0]
            if len(data) < end:
                break
            found.append(json.loads(data[at + _SIZE.size : end]))
            at = end
        self._data = data[at:]
        return found


class Channel(Connection):
    """The plane's connection for guests: it brings them, and is told how they fare. Read by the door, written by the model's thread."""

    __slots__ = ("_cells", "_descriptors", "_frames", "_lock", "guests")

    def __init__(self, accepted: socket.socket) -> None:
        super().__init__(accepted, 0)
        self._frames = Frames()
        self._descriptors: deque[int] = deque()
        self._cells: mmap.mmap | None = None
        self._lock = threading.Lock()
        self.guests: dict[int, Guest] = {}
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """A process that the model has forked keeps nobody's connection open."""
        for inherited in (self, *self.guests.values()):
            inherited.socket.close()

    def hear(self) -> list[Guest | None]:
        """Read once. New guests, or None where others were told to leave. Raises HungUp when the plane has gone."""
        data, descriptors, _, _ = socket.recv_fds(self.socket, 65_536, 16, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise HungUp
        self._descriptors.extend(descriptors)  # each came with the first byte of its message
        found: list[Guest | None] = []
        for name, *told in self._frames.feed(data):
            if name == "cells":
                descriptor = self._descriptors.popleft()
                self._cells = mmap.mmap(descriptor, CELLS * CELL.size)
                socket.close(descriptor)
            elif name == "take":
                cell, terms = told
                accepted = socket.socket(fileno=self._descriptors.popleft())
                accepted.setblocking(False)
                assert self._cells is not None
                self.guests[cell] = guest = Guest(accepted, self, cell, self._cells, terms)
                found.append(guest)
            elif (leaving := self.guests.get(told[0])) is not None:
                if name == "cancel" and (call := leaving.call) is not None and call.id == told[1]:
                    call.cancelled = True
                leaving.leaves = True
                found.append(None)
        return found

    def tell(self, frame: list[Any]) -> None:
        """Tell the plane. Nothing happens when it has gone."""
        with self._lock, contextlib.suppress(HungUp):
            self.send(framed(frame))


class Guest(Connection):
    """A client's connection. It reads its requests itself, as a `Reader` would."""

    __slots__ = ("_cell", "_cells", "_channel", "_head", "_headers", "_id", "_model", "_number", "_path", "_rest", "_row", "_rows",
                 "_sent", "_told_at", "rested")  # fmt: skip

    is_guest = True
    head = room = None  # of a Reader: a request is here as a whole, or it is not

    def __init__(
        self, accepted: socket.socket, channel: Channel, cell: int, cells: mmap.mmap, terms: dict[str, Any]
    ) -> None:
        super().__init__(accepted, 0)
        self.reader = self  # type: ignore[assignment]
        self._channel, self._cell, self._cells = channel, cell, cells
        self._head, self._path, self._model = terms["head"].encode("latin-1"), terms["path"], terms["model"].encode()
        self._headers, self._id, self._number = terms["headers"], terms["id"], 0
        self._rest = b""  # read, and not taken
        self._sent = 0  # bytes
        self._row: list[Any] = []  # of the present call
        self._rows: list[list[Any]] = []  # of calls that have ended, for the plane
        self.rested = self._told_at = time.monotonic()

    # ---- reading

    @property
    def begun(self) -> bool:
        return bool(self._rest)

    def receive(self) -> Request | None:
        self._cells[self._cell * CELL.size] = (
            READS  # before anything is read: what is lost with this process is known to be
        )
        try:
            return super().receive()
        except BlockingIOError:
            self._settle()
            raise

    def feed(self, data: bytes) -> Request | None:
        """Take what came; a request once it is whole. Raises HungUp when the plane has to read on."""
        self._rest = data = self._rest + data if self._rest else data
        self.rested = time.monotonic()
        end = data.find(b"\r\n\r\n", 0, _LONGEST_HEAD)
        found = _LENGTH.search(data, 0, end + 2) if end > 0 else None
        if found is None:
            raise HungUp
        (start, stop), length = found.span(1), int(found[1])
        if length > _LONGEST_BODY or data[:start] + data[stop:end] != self._head:
            raise HungUp
        whole = end + 4 + length
        if len(data) < whole:
            return None
        body = data[end + 4 : whole]
        named = MODEL.match(body)
        if named is None or named[1] != self._model:
            raise HungUp
        self._rest = data[whole:]
        self._number += 1
        CELL.pack_into(self._cells, self._cell * CELL.size, READS, self.rested, self._number, 0)
        self._row = [self._number, 0.0, length, 0, 200]
        request = Request("POST", self._path, False, dict(self._headers))
        request.headers["x-ostler-request-id"] = f"{self._id}-{self._number}"
        request.body, request.length = body, length
        return request

    # ---- answering

    def send(self, data: bytes | memoryview) -> None:
        self._cells[self._cell * CELL.size] = ANSWERS
        self._row[3] += len(data)
        self._sent += len(data)
        super().send(data)

    def answers(self, made: bytes) -> None:
        self._sent += len(made)
        until = 0 if self._rest else self._sent  # what was read of the next request would be lost
        CELL.pack_into(self._cells, self._cell * CELL.size, ANSWERS, self.rested, self._number, until)
        self._row[3], self._row[4] = len(made) - made.find(b"\r\n\r\n") - 4, int(made[9:12])

    def answered(self) -> None:
        if self._row:
            now = time.monotonic()
            self._row[1], self.rested = now - self.rested, now
            self._rows.append(self._row)
            self._row = []
        self._settle()

    def _settle(self) -> None:
        CELL.pack_into(self._cells, self._cell * CELL.size, READS if self._rest else RESTS, 0.0, self._number, 0)

    # ---- what the plane is told

    def is_tired(self, now: float) -> bool:
        """Whether it has asked nothing for a while. Tells the plane of its calls meanwhile."""
        if self._rows and now - self._told_at > _TOLD:
            self._told_at = now
            self._channel.tell(["rows", self._cell, self._rows])
            self._rows = []
        return now - self.rested > TIRED

    def close(self) -> None:
        """Back to the plane, with what was read and not taken, and the rest of an answer that the client is slow to read; unless a call
        ends without its answer, or the client has gone.
        """
        if self._channel.guests.pop(self._cell, None) is None:
            super().close()
            return
        unsent, self.out = self.out, None
        if unsent is not None and not self.gone:  # the model waits for no client: the plane has the patience
            for at in range(0, len(unsent), _PIECE):
                self._channel.tell(["unsent", self._cell, [], str(unsent[at : at + _PIECE], "latin-1")])
            self.answered()
        name = "gone" if self.gone else "ended" if self._row else "back"
        super().close()
        self._channel.tell([name, self._cell, self._rows, self._rest.decode("latin-1")])
