"""ID3v2 tags as bytes. Ours are put in front of the frames that are there, and taken away again: not one byte of the others changes."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping

_HEADER = 10
_UNSYNCHRONISED, _EXTENDED, _FOOTER = 0x80, 0x40, 0x10
_LARGEST = 2**28 - 1
SEPARATOR = "; "  # of several values in ID3v2.3, which has none of its own

Tags = Mapping[str, list[str]]


class NotPlain(Exception):
    """The tag is of a rare kind that is left to mutagen."""


def length(head: bytes) -> int:
    """The bytes of the tag that begins here; 0 where none does."""
    if len(head) < _HEADER or head[:3] != b"ID3" or max(head[6:10]) > 127:
        return 0
    return _HEADER + _syncsafe(head[6:10]) + (_HEADER if head[5] & _FOOTER else 0)


def rewrite(tag: bytes, prefix: str, wanted: Tags) -> bytes:
    """The tag with these values under `prefix` and no others; empty where nothing is left in it. Raises NotPlain."""
    if not tag:
        return _tag(4, b"", b"", frames(4, prefix, wanted)) if wanted else b""
    version, flags = tag[3], tag[5]
    if version not in (3, 4) or flags & _FOOTER or (version == 3 and flags & _UNSYNCHRONISED):
        raise NotPlain
    start = _HEADER + (_extended(tag, version) if flags & _EXTENDED else 0)
    body = tag[_after_ours(tag, start, version, prefix) :]
    new = frames(version, prefix, wanted)
    if not new and not body.strip(b"\0"):
        return b""
    return _tag(version, tag[3:6], tag[_HEADER:start], new + body)


def frames(version: int, prefix: str, wanted: Tags) -> bytes:
    """TXXX frames with our values, one for each name."""
    return b"".join(_frame(version, f"{prefix}{name}", values) for name, values in sorted(wanted.items()))


def _frame(version: int, name: str, values: list[str]) -> bytes:
    if version == 4:
        content = b"\x03" + "\0".join([name, *values]).encode()
        return b"TXXX" + _as_syncsafe(len(content)) + b"\0\0" + content
    text = f"{name}\0" + SEPARATOR.join(value.replace(";", ",") for value in values)
    if text.isascii():
        content = b"\0" + text.encode("ascii")
    else:
        content = b"\x01" + "\0".join("\ufeff" + part for part in text.split("\0")).encode("utf-16-le")
    return b"TXXX" + struct.pack(">I", len(content)) + b"\0\0" + content


def _tag(version: int, kept: bytes, extended: bytes, body: bytes) -> bytes:
    size = len(extended) + len(body)
    if size > _LARGEST:
        raise NotPlain
    return b"ID3" + (kept or bytes((version, 0, 0))) + _as_syncsafe(size) + extended + body


def _extended(tag: bytes, version: int) -> int:
    """The length of the extended header. One with a checksum, or with limits, is not for us to change."""
    size = _syncsafe(tag[10:14]) if version == 4 else 4 + struct.unpack(">I", tag[10:14])[0]
    plain = tag[14:16] == b"\x01\0" if version == 4 else tag[14:16] == b"\0\0"
    if not plain or size > 64:
        raise NotPlain
    return int(size)


def _after_ours(tag: bytes, start: int, version: int, prefix: str) -> int:
    """Where the frames of others begin: ours stand in front."""
    while True:
        size = _own(tag[start:], version, prefix)
        if size is None:
            return start
        start += size


def _own(data: bytes, version: int, prefix: str) -> int | None:
    """The length of the frame of ours that begins here."""
    if data[:4] != b"TXXX" or data[8:10] != b"\0\0":
        return None
    size = _syncsafe(data[4:8]) if version == 4 else struct.unpack(">I", data[4:8])[0]
    content = data[_HEADER : _HEADER + size]
    starts = {b"\x03" + prefix.encode(), b"\0" + prefix.encode(), b"\x01" + f"\ufeff{prefix}".encode("utf-16-le")}
    return _HEADER + int(size) if len(content) == size and content.startswith(tuple(starts)) else None


def _syncsafe(four: bytes) -> int:
    return four[0] << 21 | four[1] << 14 | four[2] << 7 | four[3]


def _as_syncsafe(number: int) -> bytes:
    return bytes((number >> 21 & 127, number >> 14 & 127, number >> 7 & 127, number & 127))


def split(values: list[str]) -> list[str]:
    """The values that were joined for ID3v2.3; any tool may have carried them over into another version."""
    return re.split(re.escape(SEPARATOR), values[0]) if len(values) == 1 else values
