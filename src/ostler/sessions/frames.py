"""WebSocket frames (RFC 6455), as far as a relay needs them: where they begin and end, and a few of its own. Standard library alone.

A relay passes bytes on as they are. `Track` follows their headers and skips what they hold, so that a ping or a close can be put
between two frames. `Unframed` is for a bridge, where one side speaks WebSocket and the other does not.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0, 1, 2, 8, 9, 10
LONGEST_CONTROL = 125  # bytes that a ping, pong or close may hold
LONGEST_REASON = LONGEST_CONTROL - 2
NO_CODE = 1005  # a close frame without a code
ABNORMAL = 1006  # the connection ended without a close frame; never in a frame
_FIN, _MASKED = 0x80, 0x80


class Closed(NamedTuple):
    """What a close frame says."""

    code: int
    text: str


class BadFrame(Exception):
    """A frame that RFC 6455 does not allow; the text says why."""


def header(opcode: int, size: int) -> bytes:
    """The header of an unmasked frame that is a whole message."""
    if size <= LONGEST_CONTROL:
        return bytes((_FIN | opcode, size))
    if size < 65_536:
        return struct.pack("!BBH", _FIN | opcode, 126, size)
    return struct.pack("!BBQ", _FIN | opcode, 127, size)


def ping(payload: bytes) -> bytes:
    return header(PING, len(payload)) + payload


def pong(payload: bytes) -> bytes:
    return header(PONG, len(payload)) + payload


def close(code: int, text: str = "") -> bytes:
    """A close frame; a text that is too long is cut between two characters."""
    reason = text.encode(errors="replace")[:LONGEST_REASON].decode(errors="ignore").encode()
    return header(CLOSE, 2 + len(reason)) + struct.pack("!H", code) + reason


def read_close(payload: bytes) -> Closed:
    """What the payload of a close frame says, however odd it is."""
    if len(payload) < 2:
        return Closed(NO_CODE, "")
    return Closed(struct.unpack_from("!H", payload)[0], payload[2:].decode(errors="replace"))


def masked(data: bytes, mask: bytes, at: int = 0) -> bytes:
    """Masked or unmasked: the same. `at`: how many bytes of the frame came before."""
    if not data:
        return data
    turn = at % 4
    key = (mask[turn:] + mask[:turn]) * (len(data) // 4 + 1)
    return (int.from_bytes(data, "little") ^ int.from_bytes(key[: len(data)], "little")).to_bytes(len(data), "little")


class Track:
    """Follows the frames of one direction without holding what they carry."""

    __slots__ = ("_close", "_head", "_left", "_told", "closed")

    def __init__(self, told: Callable[[], None] = lambda: None) -> None:
        self.closed: Closed | None = None  # the close frame that went by: `told` is called then
        self._told = told
        self._left = 0  # bytes of the present frame that are still to come
        self._head = b""  # a header that is not whole
        self._close: tuple[bytes, bytearray] | None = None  # mask and what is here of a close frame that is not whole

    @property
    def between(self) -> bool:
        """Whether the last byte was the last of a frame."""
        return not self._left and not self._head

    def resume(self, left: int, head: bytes) -> None:
        """Somebody else has followed it up to here: so many bytes of a frame are to come, or so much of a header is here."""
        self._left, self._head = left, head

    def feed(self, data: bytes) -> bool:
        """Follow what goes by; whether it was more than pings, pongs and a close."""
        at, size = self._left, len(data)
        if self._close is not None:
            self._gather(data[:at])
        elif at >= size:
            self._left = at - size
            return True
        if self._head:
            data = self._head + data
            size, self._head = len(data), b""
        counts = at > 0 and self._close is None
        while at < size:
            start = at + 2
            if start > size:
                break
            second = data[at + 1]
            length = second & 127
            if length == 126:
                start += 2
                if start > size:
                    break
                length = data[at + 2] << 8 | data[at + 3]
            elif length == 127:
                start += 8
                if start > size:
                    break
                length = int.from_bytes(data[at + 2 : start], "big")
            if second & _MASKED:
                start += 4
                if start > size:
                    break
            opcode = data[at] & 15
            if opcode < CLOSE:
                counts = True
            elif opcode == CLOSE and self.closed is None and length <= LONGEST_CONTROL:
                self._begin_close(data, start, length, bool(second & _MASKED))
            at = start + length
        else:
            self._left = at - size
            return counts
        self._left, self._head = 0, data[at:]
        return counts

    def _begin_close(self, data: bytes, start: int, length: int, is_masked: bool) -> None:
        mask = data[start - 4 : start] if is_masked else bytes(4)
        self._close = (mask, bytearray())
        self._left = length
        self._gather(data[start : start + length])

    def _gather(self, piece: bytes) -> None:
        assert self._close is not None
        mask, held = self._close
        held += piece
        if len(piece) >= self._left:
            self.closed, self._close = read_close(masked(bytes(held), mask)), None
            self._told()


class Unframed:
    """Takes the frames of a client apart: what they carry goes out as it comes, with nothing held but a control frame."""

    def __init__(self) -> None:
        self.closed: Closed | None = None
        self._head = b""
        self._left, self._done = 0, 0  # bytes of the present frame to come, and passed
        self._mask, self._opcode = b"", 0
        self._held = b""  # of a control frame

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """(what the frames carried, what is to be answered to pings). Raises BadFrame; after a close nothing counts."""
        out: list[bytes] = []
        back: list[bytes] = []
        data, self._head = self._head + data, b""
        at, size = 0, len(data)
        while self.closed is None:
            if not self._left and not self._is_open():
                start = self._begin(data, at)
                if start < 0:
                    self._head = data[at:]
                    break
                at = start
            piece = data[at : at + self._left]
            at += len(piece)
            self._take(piece, out, back)
            if at >= size:
                break
        return b"".join(out), b"".join(back)

    def _is_open(self) -> bool:
        return bool(self._mask)

    def _begin(self, data: bytes, at: int) -> int:
        """Where the payload begins; -1: the header is not whole."""
        start = at + 2
        if start > len(data):
            return -1
        first, second = data[at], data[at + 1]
        length = second & 127
        start += {126: 2, 127: 8}.get(length, 0) + 4
        if start > len(data):
            return -1
        if length >= 126:
            length = int.from_bytes(data[at + 2 : start - 4], "big")
        self._opcode = first & 15
        if not second & _MASKED:
            raise BadFrame("a client's frames are masked")
        if first & 0x70:
            raise BadFrame("an extension was used that nobody agreed to")
        if self._opcode >= CLOSE and (length > LONGEST_CONTROL or not first & _FIN):
            raise BadFrame(f"a control frame has at most {LONGEST_CONTROL} bytes and is whole")
        self._mask, self._left, self._done, self._held = data[start - 4 : start], length, 0, b""
        return start

    def _take(self, piece: bytes, out: list[bytes], back: list[bytes]) -> None:
        plain = masked(piece, self._mask, self._done)
        self._left -= len(piece)
        self._done += len(piece)
        if self._opcode < CLOSE:
            if plain:
                out.append(plain)
        else:
            self._held += plain
        if self._left:
            return
        self._mask = b""
        if self._opcode == PING:
            back.append(pong(self._held))
        elif self._opcode == CLOSE:
            self.closed = read_close(self._held)
