"""One connection of a model's worker: reading requests, writing answers, and whether the other side is still there. Standard library, Python 3.9."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

from ostler.calls import answer
from ostler.calls.current import Call
from ostler.calls.request import BadRequest, Reader, Request

AT_ONCE = 65_536  # bytes of one read; a larger block would be mapped and unmapped for each, which costs more than a small call


class HungUp(Exception):
    """The other side has closed the connection."""


class Connection:
    """One connection. It belongs to the door until it is handed over (`lent`); `call` is the call that it carries now."""

    __slots__ = (
        "call",
        "cancel",
        "gone",
        "last",
        "leaves",
        "lent",
        "muted",
        "out",
        "reader",
        "refused",
        "socket",
        "whole",
    )

    is_guest = False  # see guests.py

    def __init__(self, accepted: socket.socket, max_body: int) -> None:
        self.socket = accepted
        self.reader = Reader(max_body)
        self.lent = False
        self.call: Call | None = None
        self.gone = False  # the caller has hung up
        self.cancel: Callable[[], None] | None = None  # where a flag alone would not be seen
        self.whole: Request | None = None  # the request with which it is handed over
        self.out: memoryview | None = None  # of an answer that has not been written in full
        self.muted = False  # it is not read while its call waits
        self.last = False  # it is closed after that answer
        self.leaves = False  # it is wanted back as soon as it is answered
        self.refused: float | None = None  # since when what comes is thrown away

    def receive(self) -> Request | None:
        """Read once; a request if it is whole now. Raises HungUp, BadRequest, BlockingIOError."""
        room = self.reader.room
        try:
            if room is None:
                data = self.socket.recv(AT_ONCE)
                if not data:
                    raise HungUp
                request = self.reader.feed(data)
            else:
                size = self.socket.recv_into(room)
                if not size:
                    raise HungUp
                request = self.reader.filled(size)
        except ConnectionError:
            raise HungUp from None
        except MemoryError:
            raise BadRequest(507, "OUT_OF_MEMORY", "not enough memory for the body of this request") from None
        head = self.reader.head
        if head is not None and head.expects:
            head.expects = False
            self.send(answer.CONTINUE)
        return request

    def send(self, data: bytes | memoryview) -> None:
        """Write it all, however slowly the caller reads: this is the backpressure of a stream. Raises HungUp."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self.socket.send(rest) :]
            except BlockingIOError:
                poll = select.poll()
                poll.register(self.socket, select.POLLOUT)
                poll.poll()
            except OSError:
                raise HungUp from None

    def answers(self, made: bytes) -> None:
        """An answer is about to be written."""

    def answered(self) -> None:
        """… and was, as a whole."""

    def close(self) -> None:
        self.socket.close()

    def hung_up(self) -> bool:
        """Whether the caller has closed it, or its half: who sends no more on a kept connection wants no answer any more. The plane
        then waits for our half, and so knows when the worker is free.
        """
        poll = select.poll()
        try:
            poll.register(self.socket, select.POLLRDHUP)
            return any(events & (select.POLLHUP | select.POLLRDHUP) for _, events in poll.poll(0))
        except (OSError, ValueError):
            return False  # closed on our side
