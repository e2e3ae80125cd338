"""The control channel: JSON arrays, one a line, on an inherited Unix socket. Standard library alone: both ends use it.

    node -> worker                                       worker -> node
    ["label", token]    first; see process.py            ["ready", info]           loaded, can serve
    ["stop"]            finish and exit with 0           ["beat", rss_mb, peak_mb, facts]  alive, from the side thread
    ["wanted", …]       the answer to a heartbeat        ["tired", why]            asks to be recycled when it is idle
    ["work", …]         what the pool's tenant sends
                                                         [kind, …]                 what the pool's tenant understands

EOF on either side means that the other one died.
"""

from __future__ import annotations

import json
from typing import Any

Frame = list[Any]
_encode = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make a new one for each frame
LONGEST = 64 * 1024 * 1024  # a line longer than this is not ours


def encode(frame: Frame) -> bytes:
    """One frame as bytes."""
    return _encode(frame).encode() + b"\n"


class Frames:
    """Bytes in, frames out. What is not a frame ends it: `broken` then says why, and those before it are still given."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []  # of a line whose end has not come
        self._length = 0
        self.broken: str | None = None

    def feed(self, data: bytes) -> list[Frame]:
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join((*self._parts, lines[0]))
            self._parts, self._length = [], 0
        self._parts.append(rest)
        self._length += len(rest)
        if self._length > LONGEST:
            self.broken = "a line of the control channel is too long"
        frames: list[Frame] = []
        for line in lines:
            try:
                frame = json.loads(line.decode())  # of bytes, json would guess the encoding first
            except ValueError:
                frame = None
            if not isinstance(frame, list) or not frame or not isinstance(frame[0], str):
                self.broken = f"not a frame: {line[:80]!r}"
                break  # what came before it still counts
            frames.append(frame)
        return frames
