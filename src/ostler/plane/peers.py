"""Who is at the other end of a connection from this machine: the user whose process opened it, as the kernel tells.

Asked once per connection. An answer counts only for a socket that a process still holds (its inode is not 0): one that was
closed is listed as root's. No answer is None, which is nobody's friend.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from pathlib import Path

_SOCK_DIAG, _BY_FAMILY = 4, 20  # the netlink protocol, and the type of its question and answer
_HEAD = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI")
_ANY_COOKIE = b"\xff" * 8
# Where an answer has addresses and user (then the inode): struct inet_diag_msg, behind its head.
_PAIR, _UID = 16 + 4, 16 + 64

_Address = tuple[str, int]


class Peers:
    """Looks users up: by one exact question to the kernel, or in /proc where that is not answered."""

    def __init__(self) -> None:
        self._kernel: socket.socket | None = None
        self._is_open, self._answers, self._asked = False, False, 0

    def _open(self) -> None:
        """At the first question: who only imports this has nothing open."""
        self._is_open = True
        with contextlib.suppress(OSError, AttributeError):  # no Linux, or not allowed here
            self._kernel = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG)
            self._kernel.setblocking(False)

    def uid(self, peer: _Address, ours: _Address) -> int | None:
        """The user of the process at `peer` that is connected to `ours`; None when it is not known."""
        try:
            here, there = ipaddress.ip_address(ours[0]), ipaddress.ip_address(peer[0])
            if not there.is_loopback:
                return None
            found = self._ask(there.packed, peer[1], here.packed, ours[1])
            if found is None and not self._answers:
                found = _listed(there.packed, peer[1], here.packed, ours[1])
        except (OSError, ValueError):
            return None
        return found

    def _ask(self, source: bytes, sport: int, target: bytes, dport: int) -> int | None:
        if not self._is_open:
            self._open()
        if self._kernel is None:
            return None
        family = socket.AF_INET if len(source) == 4 else socket.AF_INET6
        pair = struct.pack(">HH", sport, dport) + source.ljust(16, b"\0") + target.ljust(16, b"\0")
        body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + pair + bytes(4) + _ANY_COOKIE
        self._asked = self._asked % 0xFFFFFFFF + 1
        self._kernel.send(_HEAD.pack(_HEAD.size + len(body), _BY_FAMILY, 1, self._asked, 0) + body)
        answer = self._kernel.recv(4096)  # the kernel answers within the send
        while _HEAD.unpack_from(answer)[3] != self._asked:  # never that of another question
            answer = self._kernel.recv(4096)
        if _HEAD.unpack_from(answer)[1] != _BY_FAMILY:
            return None
        self._answers = True
        # Where the connection is gone, the kernel may name a listener on the same port instead.
        is_it = answer[_PAIR : _PAIR + len(pair)] == pair
        uid, inode = struct.unpack_from("=II", answer, _UID)
        return int(uid) if is_it and inode else None


def _listed(source: bytes, sport: int, target: bytes, dport: int) -> int | None:
    table = Path("/proc/net/tcp" if len(source) == 4 else "/proc/net/tcp6").read_text(encoding="ascii")
    at = table.find(f" {_shown(source, sport)} {_shown(target, dport)} ")
    if at < 0:
        return None
    fields = table[at : at + 300].split()
    uid, inode = int(fields[6]), int(fields[8])
    return uid if inode else None


def _shown(address: bytes, port: int) -> str:
    """As the kernel prints it: words in the machine's own byte order."""
    words = struct.unpack(f"={len(address) // 4}I", address)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
