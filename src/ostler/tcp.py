"""What the system knows and does about a TCP connection, whoever reads and writes it. Standard library alone."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import socket
import struct
import sys
import termios
from typing import NamedTuple

_INFO = struct.Struct(
    "=44xI4xI64xQQ"
)  # Linux's tcp_info: last_data_sent, last_data_recv (ms), bytes_acked, bytes_received


class Seen(NamedTuple):
    """One look at a connection. Bytes are counted since it was opened."""

    read: int  # by whoever has it
    acknowledged: int  # by the other end
    unacknowledged: int  # written, and not taken by the other end yet
    heard: float  # seconds since the last bytes came
    sent: float  # seconds since the last bytes went

    @property
    def written(self) -> int:
        return self.acknowledged + self.unacknowledged


NOTHING = Seen(0, 0, 0, 0.0, 0.0)


def look(file: int) -> Seen:
    """Look at the connection with that descriptor; NOTHING where the system does not tell."""
    try:
        with socket.socket(fileno=os.dup(file)) as shared:
            unacknowledged, before, told = _waiting(shared, termios.TIOCOUTQ), -1, b""
            while unacknowledged != before:  # what is acknowledged between the two looks would be missed
                before, told = unacknowledged, shared.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                unacknowledged = _waiting(shared, termios.TIOCOUTQ)
            unread = _waiting(shared, termios.FIONREAD)
    except OSError:
        return NOTHING
    if len(told) < _INFO.size:
        return NOTHING
    sent, heard, acknowledged, received = _INFO.unpack_from(told)
    return Seen(received - unread, acknowledged, unacknowledged, heard / 1000, sent / 1000)


def has_room(file: int) -> bool:
    """Whether it would take more bytes now."""
    poll = select.poll()
    poll.register(file, select.POLLOUT)
    return bool(poll.poll(0))


def has_left(file: int) -> bool:
    """Whether the other end has closed its direction, of a connection that nobody reads. Also for Unix sockets."""
    poll = select.poll()
    poll.register(file, select.POLLRDHUP)
    return bool(poll.poll(0))


def is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6)


def keep_alive(
    transport: asyncio.Transport, quiet: float, every: float, times: int, unread: float | None = None
) -> None:
    """Have the system ask the other end whether it is there: after so many quiet seconds, so often, and it is lost after so many times, or when
    it has not acknowledged what was written for `unread` seconds.
    """
    sock = transport.get_extra_info("socket")
    if not is_tcp(sock):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = {"TCP_KEEPIDLE": max(1, int(quiet)), "TCP_KEEPINTVL": max(1, int(every)), "TCP_KEEPCNT": times}
    if unread is not None:
        seconds["TCP_USER_TIMEOUT"] = int(unread * 1000)
    for option, value in seconds.items():
        with contextlib.suppress(AttributeError):  # not every system has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _waiting(sock: socket.socket, where: int) -> int:
    return int.from_bytes(fcntl.ioctl(sock, where, bytes(4)), sys.byteorder)
