"""Who a node is: an id for each start, with the name in it that people know."""

from __future__ import annotations

import secrets

from ostler.errors import NodeLost

LIVE = ("starting", "healthy", "stopping")
"""Statuses of a node that has not ended."""
SECRET = "node_secret"  # noqa: S105  the key in the store, not the secret: what nodes know each other by


def new_id(name: str) -> str:
    """An id for one start of the node of this name."""
    return f"{name}@{secrets.token_hex(6)}"


def name_of(node: str | None) -> str | None:
    """The name in a node's id."""
    return node if node is None or "@" not in node else node.rpartition("@")[0]


def lost_node(node: str) -> NodeLost:
    """The error of a node that was declared dead."""
    return NodeLost(
        f"node {node} was declared dead: its heartbeat was older than its lease. Its jobs run elsewhere; what it had is dropped"
    )
