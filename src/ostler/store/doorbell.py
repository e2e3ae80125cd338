"""The doorbell: a Unix datagram socket in the data directory. Who enqueues rings; the node wakes. Losing a ring costs
one fallback poll, never a job.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from ostler import private

_NAME = "doorbell"
_LONGEST = 100  # sun_path holds 108 bytes
_MOMENT = 0.05  # seconds
_nobody: dict[Path, float] = {}  # data directories without a node, and until when that is taken as given


@cache
def _short_address(data: Path) -> str | None:
    """The socket's path, where the kernel takes one so long."""
    path = str(data / _NAME)
    return path if len(path.encode()) <= _LONGEST else None


@contextlib.contextmanager
def _address(data: Path) -> Iterator[str]:
    """The socket's address; a path too long for the kernel is reached through a descriptor of its directory."""
    if path := _short_address(data):
        yield path
        return
    folder = os.open(data, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{_NAME}"
    finally:
        os.close(folder)


def ring(data: Path) -> None:
    """Wake the node of this data directory, if there is one. Never blocks and never fails.

    Where no node was a moment ago nobody is looked for: a node that comes up meanwhile reads the store, and what is stored
    within that moment after it waits for the next poll.
    """
    if _nobody and time.monotonic() < _nobody.get(data, 0.0):
        return
    try:
        if address := _short_address(data):
            _finger().sendto(b"!", socket.MSG_DONTWAIT, address)
        else:
            with _address(data) as address:
                _finger().sendto(b"!", socket.MSG_DONTWAIT, address)
    except (FileNotFoundError, ConnectionRefusedError):
        _nobody[data] = time.monotonic() + _MOMENT
    except OSError:
        return  # enough rings are waiting there
    else:
        _nobody.pop(data, None)


@cache
def _finger() -> socket.socket:
    """One socket for all rings of this process: any thread and any child may send with it."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    atexit.register(made.close)
    return made


class Doorbell:
    """The node's side."""

    def __init__(self, data: Path) -> None:
        self._data = data
        _nobody.pop(data, None)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        with contextlib.suppress(FileNotFoundError):
            (data / _NAME).unlink()
        with _address(data) as address:
            self._socket.bind(address)
        with contextlib.suppress(OSError):  # a file system without modes
            (data / _NAME).chmod(private.file_mode(data))

    def fileno(self) -> int:
        return self._socket.fileno()

    def answer(self, wake: Callable[[], None]) -> None:
        """Take all rings that are waiting and wake once."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(16)
        wake()

    def close(self) -> None:
        self._socket.close()
        with contextlib.suppress(OSError):
            (self._data / _NAME).unlink()
