"""Messages over a Unix socket, some with an open file: JSON, a line each. Standard library alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

_PIECE = 65_536
_LONGEST = 65_536  # bytes of a message
_FILES = 16  # in one piece


class Passage:
    """One end. `heard` gets each message; `files` are those that came and were not taken yet, each with its message at the latest; none come
    where nobody takes them. `ended` is called once, when the other end has gone or makes no sense; not after `close`.
    """

    def __init__(
        self,
        sock: socket.socket,
        heard: Callable[[Any], None],
        ended: Callable[[], None],
        *,
        takes_files: bool = True,
    ) -> None:
        sock.setblocking(False)
        self._takes_files = takes_files
        self.files: deque[int] = deque()
        self._socket: socket.socket | None = sock
        self._heard, self._ended = heard, ended
        self._loop = asyncio.get_running_loop()
        self._rest = b""  # of a message that is not whole
        self._waiting: deque[tuple[bytes, int | None]] = deque()
        self._loop.add_reader(sock, self._read)

    def send(self, message: Any, file: int | None = None) -> None:
        """Never blocks. The file stays the caller's, too."""
        if self._socket is None:
            return
        data = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        self._waiting.append((data, None if file is None else os.dup(file)))
        if len(self._waiting) == 1:
            self._write()

    def close(self) -> None:
        sock, self._socket = self._socket, None
        if sock is None:
            return
        self._loop.remove_reader(sock)
        self._loop.remove_writer(sock)
        sock.close()
        for file in (*self.files, *(file for _, file in self._waiting if file is not None)):
            os.close(file)
        self.files.clear()
        self._waiting.clear()

    def _break(self) -> None:
        if self._socket is not None:
            self.close()
            self._ended()

    def _write(self) -> None:
        while self._waiting and (sock := self._socket) is not None:
            data, file = self._waiting[0]
            try:
                sent = sock.send(data) if file is None else socket.send_fds(sock, [data], [file])
            except BlockingIOError:
                self._loop.add_writer(sock, self._write)
                return
            except OSError:
                self._loop.call_soon(self._break)  # not while its caller is at something
                return
            if file is not None:
                os.close(file)
            self._waiting[0] = (data[sent:], None)
            if sent == len(data):
                self._waiting.popleft()
        if self._socket is not None:
            self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        assert self._socket is not None
        try:
            if self._takes_files:
                data, files, _, _ = socket.recv_fds(self._socket, _PIECE, _FILES, socket.MSG_CMSG_CLOEXEC)
                self.files.extend(files)
            else:
                data = self._socket.recv(_PIECE)  # the system closes files that come with it
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError, RecursionError):
                self._heard(json.loads(line))
        if not data or len(self._rest) > _LONGEST:
            self._break()
