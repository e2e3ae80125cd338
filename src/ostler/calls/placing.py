"""Where a call goes when several nodes have its model. Pure: what the nodes say of their models comes in, an order of nodes goes out."""

from __future__ import annotations

from typing import NamedTuple

NEVER, CROWDED, NOW = 0, 1, 2  # whether a node has memory to load a model: never, if others leave, as things are
_WARM = ("READY", "BUSY")
_THERE = ("READY", "BUSY", "STARTING", "PARKED", "PARKING", "WAKING")
_MOST = 3  # nodes that are asked before the call stays


class There(NamedTuple):
    """What a node says of a model."""

    state: str
    free: int = 0  # calls that it could take at once
    waiting: int = 0
    fits: int = NOW


class Way(NamedTuple):
    """A node to ask. `starts`: it is to take the call though it may have to wait there."""

    node: str
    starts: bool


def choose(here: There, elsewhere: dict[str, There]) -> list[Way]:
    """The nodes to ask for a place, best first; none: the call stays here. Asked only where no place is free here."""
    warm = sorted((-there.free, node) for node, there in elsewhere.items() if there.state in _WARM and there.free > 0)
    ways = [Way(node, starts=False) for _, node in warm[:_MOST]]
    if here.state in _THERE or (here.state == "IDLE" and here.fits == NOW):
        return ways  # else it waits here, or is loaded here
    there = {node: t for node, t in elsewhere.items() if t.state in _THERE or (t.state == "IDLE" and t.fits > NEVER)}
    better = sorted((t.state not in _THERE, -t.fits, t.waiting, node) for node, t in there.items())
    if here.state == "IDLE" and here.fits == CROWDED:  # others would have to leave for it here: elsewhere nobody has to
        better = [one for one in better if not one[0] or one[1] == -NOW]
    return [*ways, *(Way(node, starts=True) for *_, node in better)][:_MOST]
