"""Writes tensor bundles as TensorFlow does, small ones with made-up weights, and wheels with them."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def _message(*fields: tuple[int, int | bytes]) -> bytes:
    out = b""
    for number, value in fields:
        out += (
            varint(number << 3) + varint(value)
            if isinstance(value, int)
            else varint(number << 3 | 2) + varint(len(value)) + value
        )
    return out


def _block(entries: list[tuple[bytes, bytes]], every: int = 16) -> bytes:
    """Keys share what they have in common with the one before them, except each sixteenth."""
    out, before, restarts = b"", b"", []
    for number, (key, value) in enumerate(entries):
        shared = 0
        if number % every:
            while shared < min(len(key), len(before)) and key[shared] == before[shared]:
                shared += 1
        else:
            restarts.append(len(out))
        out += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        before = key
    restarts = restarts or [0]
    return out + b"".join(struct.pack("<I", place) for place in restarts) + struct.pack("<I", len(restarts))


def write(folder: Path, tensors: dict[str, np.ndarray], per_block: int = 30) -> None:
    """`folder/.index` and `folder/.data-00000-of-00001`."""
    folder.mkdir(parents=True, exist_ok=True)
    data, entries = b"", [(b"", _message((1, 1)))]
    for name in sorted(tensors):
        value = np.asarray(tensors[name])
        kind = {"float32": 1, "int64": 9}[value.dtype.name]
        shape = b"".join(_message((2, _message((1, size)))) for size in value.shape)
        entries.append((name.encode(), _message((1, kind), (2, shape), (4, len(data)), (5, value.nbytes), (6, 12345))))
        data += value.tobytes()
    table, index = b"", []
    for start in range(0, len(entries), per_block):
        part = entries[start : start + per_block]
        block = _block(part)
        index.append((part[-1][0], varint(len(table)) + varint(len(block))))
        table += block + b"\0" + b"crc!"
    meta = (varint(len(table)), _block([]))
    table += meta[1] + b"\0crc!"
    block = _block(index, every=1)
    footer = meta[0] + varint(len(meta[1])) + varint(len(table)) + varint(len(block))
    table += block + b"\0crc!"
    (folder / ".index").write_bytes(table + footer.ljust(40, b"\0") + struct.pack("<Q", 0xDB4775248B80FB57))
    (folder / ".data-00000-of-00001").write_bytes(data)


def weights(filters: tuple[int, int, int] = (5, 4, 3), tags: int = 50, seed: int = 3) -> dict[str, np.ndarray]:
    """A network of the shape of musicnn with few filters, some of them dead and some with a negative factor, as in the real one."""
    chance = np.random.default_rng(seed)
    timbral, temporal, middle = filters
    front = 2 * timbral + 3 * temporal
    shapes = [
        (7, 38, 1, timbral),
        (7, 67, 1, timbral),
        (128, 1, 1, temporal),
        (64, 1, 1, temporal),
        (32, 1, 1, temporal),
    ]
    shapes += [(7, front, 1, middle), (7, middle, 1, middle), (7, middle, 1, middle)]
    widths = [1, timbral, timbral, temporal, temporal, temporal, middle, middle, middle, 2 * (front + 3 * middle), 200]
    found = {}
    for number, shape in enumerate(shapes):
        name = f"conv2d_{number}" if number else "conv2d"
        kernel = chance.standard_normal(shape) / np.sqrt(np.prod(shape[:3]))
        kernel[..., 1] = 1e-20
        found[f"{name}/kernel"], found[f"{name}/bias"] = kernel, chance.standard_normal(shape[3]) * 0.2
    for number, width in enumerate(widths):
        name = f"batch_normalization_{number}" if number else "batch_normalization"
        found[f"{name}/gamma"] = chance.standard_normal(width) if number else np.ones(1)
        found[f"{name}/beta"] = chance.standard_normal(width) * 0.2
        found[f"{name}/moving_mean"] = chance.standard_normal(width) * 0.2
        found[f"{name}/moving_variance"] = chance.uniform(0.5, 2, width)
    for name, shape in {"dense": (widths[9], 200), "dense_1": (200, tags)}.items():
        found[f"{name}/kernel"] = chance.standard_normal(shape) / np.sqrt(shape[0])
        found[f"{name}/bias"] = chance.standard_normal(shape[1]) * 0.2
    return {name: value.astype(np.float32) for name, value in found.items()}
