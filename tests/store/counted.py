"""What the queue depths should be: counted from the rows."""

from __future__ import annotations

from ostler.store import Store
from tests.stores import rows


def counted(store: Store) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for queue, status, n in rows(
        store,
        "SELECT queue, CASE WHEN status = 'queued' AND later = 1 THEN 'scheduled' ELSE status END, count(*) FROM jobs"
        " WHERE status <> 'done' GROUP BY 1, 2",
    ):
        found.setdefault(queue, {})[status] = n
    return found
