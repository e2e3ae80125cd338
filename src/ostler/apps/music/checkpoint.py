"""Reads TensorFlow checkpoints (the "tensor bundle" format) with numpy alone.

A checkpoint is two files. `.index` is a sorted table as LevelDB writes it: blocks of entries whose keys share prefixes, an index of the blocks, and a
footer of 48 bytes. A value is a protobuf message with a tensor's type, shape, place and length in `.data-00000-of-00001`, which holds raw values.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FOOTER = 48
_MAGIC = 0xDB4775248B80FB57
_FLOAT32 = 1  # DT_FLOAT in types.proto
_UNCOMPRESSED = 0


class BadCheckpoint(ValueError):
    """The files are not a checkpoint that can be read, or are damaged."""


def read(prefix: str) -> dict[str, NDArray[np.float32]]:
    """The float32 tensors of the checkpoint with that path prefix (`model/` for the files `model/.index`, `model/.data-…`)."""
    import numpy as np  # noqa: PLC0415  heavy; a node that lists libraries does not need it

    index, data = Path(f"{prefix}.index"), Path(f"{prefix}.data-00000-of-00001")
    values = np.fromfile(data, np.uint8)
    try:
        entries = list(_entries(index.read_bytes()))
    except (IndexError, struct.error) as error:
        raise BadCheckpoint(f"{index} is not the index of a TensorFlow checkpoint, or is damaged ({error})") from None
    found = {}
    for name, (kind, shape, start, size) in entries:
        if kind != _FLOAT32:
            continue
        if start + size > len(values):
            raise BadCheckpoint(f"{data} has {len(values)} bytes, too few for {name}: it is damaged or incomplete")
        found[name] = values[start : start + size].view(np.float32).reshape(shape).copy()
    return found


def _entries(table: bytes) -> Iterator[tuple[str, tuple[int, list[int], int, int]]]:
    if len(table) < _FOOTER or struct.unpack("<Q", table[-8:])[0] != _MAGIC:
        raise BadCheckpoint("the file does not end as an index of a TensorFlow checkpoint does")
    footer, place = table[-_FOOTER:], 0
    for _ in range(2):  # the meta index is not needed
        _, place = _varint(footer, place)
    start, place = _varint(footer, place)
    size, _ = _varint(footer, place)
    for _, handle in _block(table, start, size):
        at, place = _varint(handle, 0)
        length, _ = _varint(handle, place)
        for key, value in _block(table, at, length):
            if key:  # the empty key holds the header
                yield key.decode(), _tensor(value)


def _block(table: bytes, start: int, size: int) -> Iterator[tuple[bytes, bytes]]:
    """The entries of one block. Each key repeats the first `shared` bytes of the key before it."""
    if table[start + size] != _UNCOMPRESSED:
        raise BadCheckpoint("the index of the checkpoint is compressed, which is not supported")
    block = table[start : start + size]
    restarts = struct.unpack("<I", block[-4:])[0]
    end, place, key = size - 4 - 4 * restarts, 0, b""
    while place < end:
        shared, place = _varint(block, place)
        own, place = _varint(block, place)
        length, place = _varint(block, place)
        key = key[:shared] + block[place : place + own]
        place += own
        yield key, block[place : place + length]
        place += length


def _tensor(message: bytes) -> tuple[int, list[int], int, int]:
    """BundleEntryProto: type (1), shape (2), offset (4) and size (5)."""
    fields = dict.fromkeys((1, 4, 5), 0)
    shape: list[int] = []
    for number, value in _fields(message):
        if number == 2:
            shape = [dict(_fields(dim)).get(1, 0) for field, dim in _fields(value) if field == 2]
        elif number in fields:
            fields[number] = value
    return fields[1], shape, fields[4], fields[5]


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: numbers for varints, bytes for all else."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        if tag & 7 == 0:
            value, place = _varint(message, place)
            yield tag >> 3, value
            continue
        length = {1: 8, 5: 4}.get(tag & 7, 0)
        if tag & 7 == 2:
            length, place = _varint(message, place)
        yield tag >> 3, message[place : place + length]
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return value, place
