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
from json.encoder import c_make_encoder, encode_basestring_ascii  # type: ignore[attr-defined]
from typing import Any

Frame = list[Any]
_scan = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
# The encoder in C is made once; `encode` would make a new one for each frame.
_chunks = c_make_encoder(None, json.JSONEncoder().default, encode_basestring_ascii, None, ":", ",", False, False, True)
LONGEST = 64 * 1024 * 1024  # a line longer than this is not ours


def encode(frame: Frame) -> bytes:
    """One frame as bytes."""
    return "".join(_chunks(frame, 0)).encode() + b"\n"


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
                text = line.decode()
                frame, end = _scan(text, 0)
                if end != len(text):
                    frame = json.loads(text)
            except (ValueError, StopIteration):
                frame = None
            if not isinstance(frame, list) or not frame or not isinstance(frame[0], str):
                self.broken = f"not a frame: {line[:80]!r}"
                break  # what came before it still counts
            frames.append(frame)
        return frames
