"""A limit for the memory that one file may take. Standard library alone."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator

MOST = 1024.0  # MB that a file may take, beside what the process has


@contextlib.contextmanager
def limited_memory(megabytes: float = MOST) -> Iterator[None]:
    """A few bytes in a file can ask a decoder for gigabytes: within it they are refused with MemoryError."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with open("/proc/self/statm") as file:  # noqa: PTH123
        used = int(file.read().split()[5]) * resource.getpagesize()
    limit = used + int(megabytes * 2**20)
    soft = min(n for n in (limit, *before) if n != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
