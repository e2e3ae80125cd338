"""Artifacts in the store: which files a job has published, under which keys, and on which node. The files are elsewhere (jobs/results.py)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from ostler.names import media_type
from ostler.store.database import Database

SHOWN = 20  # artifacts that come with a job; all of them have a listing of their own
PATH = "/api/v1/artifacts/"


class ArtifactRow(NamedTuple):
    """One publish. `at`, `size` and `sha256` are None while the run has not said that the file is there."""

    job: int
    key: str
    home: str
    at: int | None = None
    size: int | None = None
    sha256: str | None = None
    replaced_by: int | None = None


class Gone(NamedTuple):
    """A publish whose job was deleted at that time (ms)."""

    job: int
    key: str
    home: str
    since: int


class Artifacts:
    """The rows. A row is there before its file is, and until after its file is deleted."""

    def __init__(self, db: Database) -> None:
        self._db = db

    # ---- inside the transaction of whoever calls

    def begin(self, job: int, key: str, home: str) -> None:
        """The job is about to publish under the key. What it published there before stays as it is."""
        self._db.tell("artifact_begin", job=job, key=key, home=home)

    def add(self, rows: Sequence[ArtifactRow]) -> None:
        """These files are there. Of several publishes of a job under one key, the last counts."""
        last = {row[:3]: row[:6] for row in rows}
        self._db.run_many("artifact_done", [*last.values()])

    def mark_gone(self, jobs: Sequence[int]) -> None:
        """Their jobs are deleted: the files go next."""
        self._db.tell("artifacts_mark_gone", ids=json.dumps([*jobs]), now=self._db.now())

    # ---- reading

    def of(self, job: int, after: str = "", limit: int = 100) -> list[ArtifactRow]:
        """What a job has published, in the order of the keys, from after that key on; also what was not completed."""
        return [ArtifactRow(*row) for row in self._db.run("artifacts_of", job=job, after=after, limit=limit)]

    def newest(self, key: str) -> ArtifactRow | None:
        """The last publish under the key, by whichever job."""
        rows = self._db.run("artifact_newest", key=key)
        return ArtifactRow(*rows[0]) if rows else None

    def gone(self, after: Gone | None = None, limit: int = 500) -> list[Gone]:
        """Publishes whose job is deleted and whose file may be there, from after this one on."""
        job, key, home, _ = after or Gone(0, "", "", 0)
        return [Gone(*row) for row in self._db.run("artifacts_gone", job=job, key=key, home=home, limit=limit)]

    def forget(self, publishes: Sequence[Gone]) -> None:
        """Delete the rows of these publishes, whose files are gone."""
        if publishes:
            self._db.run_many("artifact_forget", [one[:3] for one in publishes])


def shown(row: ArtifactRow) -> dict[str, Any]:
    """An artifact as everybody outside sees it (`views.ARTIFACT`)."""
    return {
        "key": row.key,
        "size": row.size,
        "sha256": row.sha256,
        "type": media_type(row.key),
        "at": row.at,
        "url": PATH + quote(row.key),
        "replaced_by": row.replaced_by,
    }
