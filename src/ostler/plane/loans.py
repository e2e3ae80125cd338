"""One connection that is lent to a worker, and the channel on which the plane and the worker agree about it. What is lent, and when it comes back: lending.py."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
from typing import TYPE_CHECKING, Any

from ostler import tcp
from ostler.calls.guests import CELL, CELLS, PATH, WELCOME, Frames, framed
from ostler.plane.leases import Place
from ostler.plane.plan import Refuse

if TYPE_CHECKING:
    from ostler.plane.client import Client
    from ostler.plane.lending import Lender

_OPENING = b"POST %b HTTP/1.1\r\nhost: worker\r\n\r\n" % PATH.encode()


class Loan:
    """A connection that is lent, and the place that it holds."""

    def __init__(self, channel: Channel, cell: int, client: Client, timeout: float, number: int) -> None:
        self.channel, self.cell, self.client, self.timeout = channel, cell, client, timeout
        self.id = f"{number:016x}"
        self.verdict: Refuse | None = None  # why its call is being ended
        self._written = tcp.look(client.file).written
        self.holds = False  # it is at a long call, and holds a place for that
        self.is_recalled = False
        self.served = 0

    def at(self) -> tuple[int, float, int]:
        """What it is at, since when, and the number of its call."""
        state, began, number, _ = CELL.unpack_from(self.channel.cells, self.cell * CELL.size)
        return state, began, number

    def is_answered(self) -> bool:
        """Whether its worker has died with all of its answer written: the kernel knows how much that was."""
        until = CELL.unpack_from(self.channel.cells, self.cell * CELL.size)[3]
        return bool(until) and tcp.look(self.client.file).written - self._written == until

    def recall(self) -> None:
        """Have it back as soon as it is answered. Said once: a worker that is slow to listen has no endless room for it."""
        if not self.is_recalled:
            self.is_recalled = True
            self.channel.send(["recall", self.cell])

    def hang_up(self) -> None:
        """End the connection for the worker, too: it has it open, so that closing our end alone would not be seen by the client."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.client.file)) as shared:
            shared.shutdown(socket.SHUT_RDWR)


class Channel:
    """The way to one worker's guests."""

    def __init__(self, lender: Lender, place: Place) -> None:
        self._lender, self.place = lender, place
        self.is_open = False
        self.waits = 0  # looks in a row at which calls waited in line
        self.loans: dict[int, Loan] = {}
        self.cells = mmap.mmap(-1, CELLS * CELL.size)
        self._frames: Frames | None = None
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._loop = asyncio.get_running_loop()
        try:
            self._socket.setblocking(False)
            self._socket.connect(place.upstream.path)
            self._socket.send(_OPENING)
        except OSError:  # its line is full, or it has gone: the next try may work
            self.close()
            return
        self._loop.add_reader(self._socket, self._heard)

    def send(self, frame: list[Any], *descriptors: int) -> bool:
        """Tell the worker; False when it cannot be told, and then it is of no use any more."""
        if self._socket is None:
            return False
        data = framed(frame)
        with contextlib.suppress(OSError):
            if socket.send_fds(self._socket, [data], descriptors) == len(data):
                return True
        self.close()
        return False

    def free(self) -> int | None:
        return next((cell for cell in range(CELLS) if cell not in self.loans), None)

    def _heard(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(262_144)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:  # it has ended
            self._lender.worker_left(self)
        elif self._frames is None and data != WELCOME:
            self.close(refuses=True)
        elif self._frames is None:
            self._welcomed()
        else:
            for name, cell, rows, *rest in self._frames.feed(data):
                if (loan := self.loans.get(cell)) is not None:
                    self._lender.told(loan, name, rows, *rest)

    def _welcomed(self) -> None:
        self._frames = Frames()
        memory = os.memfd_create("ostler-guests")
        try:
            os.ftruncate(memory, CELLS * CELL.size)
            self.cells.close()
            self.cells = mmap.mmap(memory, CELLS * CELL.size)
            self.is_open = self.send(["cells"], memory)
        finally:
            os.close(memory)

    @property
    def is_closed(self) -> bool:
        return self._socket is None

    def close(self, *, refuses: bool = False) -> None:
        """No more guests. Those that are there are dealt with by what they are at. `refuses`: its worker takes none, so nobody asks again."""
        if not refuses:
            self._lender.drop(self)
        sock, self._socket = self._socket, None
        self.is_open = False
        if sock is not None:
            with contextlib.suppress(ValueError):
                self._loop.remove_reader(sock)
            sock.close()
        for loan in [*self.loans.values()]:
            self._lender.lost(loan)
