"""How many threads a model computes with. Standard library, Python 3.9."""

from __future__ import annotations

import os


def count() -> int:
    """Half of the cores that this process may use.

    Threads of these libraries wait for each other by spinning. With as many as there are cores, one busy neighbour makes a call several
    times slower; with half of them it costs little.
    """
    return max(1, len(os.sched_getaffinity(0)) // 2)
