"""Where models are: what each node says of its models, so that every node knows where a call can go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ostler.store.database import Database


class PlaceRow(NamedTuple):
    """One model on one node. `free`: calls that it could take at once; `fits`: whether there is memory to load it."""

    task: str
    model: str
    state: str
    free: int
    waiting: int
    fits: int


class Places:
    """The table of places. A node writes its own rows alone, and those of nodes that do not live are not read."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def put(self, node: str, rows: Sequence[PlaceRow]) -> None:
        """These are all models of the node, now."""
        with self._db.transaction():
            self._db.run("clear_places", node=node)
            if rows:
                self._db.run_many("put_places", [(node, *row) for row in rows])

    def all(self) -> list[dict[str, Any]]:
        """The models of all living nodes: node, name, url, task, model, state, free, waiting, fits."""
        return [dict(row) for row in self._db.run("places", now=self._db.now())]
