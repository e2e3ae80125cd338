"""The reading verbs about jobs: one, many, a page, where it stands, how many wait. None of them writes."""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ostler.errors import NotFound
from ostler.store import views
from ostler.store.artifacts import SHOWN, Artifacts, shown
from ostler.store.database import Database
from ostler.store.rows import JobStatus

_LARGEST = 2**63 - 1  # the largest number that the store can hold
EVENTS = 200  # entries of a page of a timeline, where nobody says how many
_EVENT_BYTES = 524_288  # of their data in one page
_EVENTS_AT_ONCE = 20
ERRORS = 20  # runs of a job whose errors are kept: the newest ones
_SEARCHED = 20_000  # jobs that one page of a search looks at


class JobReading:
    """Jobs and their timeline in the store, to look at."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self.artifacts = Artifacts(db)

    def find(self, job: int) -> dict[str, Any]:
        """The job; raises NotFound."""
        return views.job(self._row(job))

    def _row(self, job: int) -> Any:
        rows = self._db.run("job", id=job) if job <= _LARGEST else []
        if not rows:
            raise NotFound(f"there is no job {job}")
        return rows[0]

    def ran_on(self, job: int) -> str | None:
        """The id of the node that ran the job last; None when none did, or nobody wrote it down."""
        rows = self._db.run("last_run", job=job)
        return (json.loads(rows[0]["data"] or "{}") or {}).get("node") if rows else None

    def get(self, job: int) -> dict[str, Any]:
        """The job with the errors of its runs, the newest page of its timeline and the first of its artifacts; raises NotFound."""
        row = self._row(job)
        published = self.artifacts.of(job, limit=SHOWN) if row["held"] else []  # who never asked has none
        artifacts = [shown(one) for one in published if one.at is not None]
        found = {"errors": self.errors(job), "events": self.newest_events(job), "artifacts": artifacts}
        return {**views.job(row), **found}

    def errors(self, job: int) -> builtins.list[dict[str, Any]]:
        """How each of its last runs failed, oldest first; those that were done, snoozed or stopped are not among them."""
        return [views.run_error(row) for row in reversed(self._db.run("errors", job=job, limit=ERRORS))]

    def standing(self, job: int, most: int) -> dict[str, Any] | None:
        """Where a queued job stands in its queue and under its limits; None when it is not queued. Raises NotFound.

        Jobs before it are counted no further than one above `most`.
        """
        for row in self._db.run("standing", id=job, most=most + 1):
            ahead = min(row["higher"] + row["earlier"], most + 1)
            return {**dict(row), "ahead": ahead} if row["status"] == JobStatus.QUEUED else None
        raise NotFound(f"there is no job {job}")

    def short(self, jobs: Iterable[int]) -> builtins.list[dict[str, Any]]:
        """Short views of these jobs, in order of their ids; those that are no more are left out."""
        return [views.short_job(row) for row in self._db.run("short_jobs", ids=json.dumps([*jobs]))]

    def events(self, job: int) -> builtins.list[dict[str, Any]]:
        """The job's whole timeline, oldest first."""
        found: builtins.list[dict[str, Any]] = []
        after: int | None = 0
        while after is not None:
            page, after = self.event_page(job, after)
            found += page
        return found

    def event_page(
        self, job: int, after: int = 0, limit: int = EVENTS
    ) -> tuple[builtins.list[dict[str, Any]], int | None]:
        """The part of the timeline after a number, oldest first, bounded in entries and bytes; and where the next one begins."""
        rows = self._bounded("events_after", job, after, limit)
        more = bool(rows) and bool(self._db.run("events_after", id=job, edge=rows[-1]["seq"], limit=1))
        return [views.event(r) for r in rows], rows[-1]["seq"] if more else None

    def newest_events(self, job: int, limit: int = EVENTS) -> builtins.list[dict[str, Any]]:
        """The end of the timeline, oldest first, bounded in entries and bytes."""
        return [views.event(r) for r in reversed(self._bounded("events_before", job, _LARGEST, limit))]

    def _bounded(self, statement: str, job: int, edge: int, limit: int) -> builtins.list[Any]:
        """At least one row if there is any, and no more once `_EVENT_BYTES` are together. Few at a time: each may be large."""
        rows: builtins.list[Any] = []
        size = 0
        while len(rows) < limit and size < _EVENT_BYTES:
            wanted = min(_EVENTS_AT_ONCE, limit - len(rows))
            found = self._db.run(statement, id=job, edge=edge, limit=wanted)
            for row in found:
                size += len(row["data"] or "")
                if rows and size > _EVENT_BYTES:
                    return rows
                rows.append(row)
                edge = row["seq"]
            if len(found) < wanted:
                break
        return rows

    def list(
        self,
        *,
        status: str | None = None,
        queue: str | None = None,
        task: str | None = None,
        code: str | None = None,
        batch: int | None = None,
        search: str | None = None,
        limit: int = 50,
        cursor: int | None = None,
    ) -> tuple[builtins.list[dict[str, Any]], int | None]:
        """Newest first, as short views, and the cursor of the next page or None.

        `search` is looked for in id, task, arguments and error. One page of a search looks at no more than 20,000 jobs; it may have
        few or none and still name a next one.
        """
        conditions, values = _conditions(status=status, queue=queue, task=task, code=code, batch=batch)
        if cursor is not None:
            conditions.append("before")
            values["cursor"] = cursor
        floor = 0
        if search:
            top = cursor if cursor is not None else self._newest() + 1
            floor = max(0, top - _SEARCHED)
            coded = json.dumps(search)[1:-1]  # as it stands in arguments and errors: JSON in ASCII
            conditions.append("found")
            values |= {"floor": floor, "search": search.strip(), "like": _like(search), "coded": _like(coded)}
        rows = self._db.select("list_jobs", conditions, **values, limit=limit + 1)
        page = self.short(row["id"] for row in rows[:limit])[::-1]
        if len(rows) > limit:
            return page, rows[limit - 1]["id"]
        return page, (floor or None)

    def _newest(self) -> int:
        rows = self._db.run("newest_ids", after=0, limit=1)
        return int(rows[0]["id"]) if rows else -1

    def matching(self, status: str, limit: int, **filters: Any) -> builtins.list[int]:
        """Ids of jobs with this status (or `live`: queued and processing) that the filters fit, oldest first."""
        conditions, values = _conditions(status=status, **filters)
        return [row["id"] for row in self._db.select("match_jobs", conditions, **values, limit=limit)]

    def depths(self) -> dict[str, dict[str, int]]:
        """Per queue: queued, scheduled, processing, failed and cancelled."""
        found: dict[str, dict[str, int]] = {}
        for row in self._db.run("depths"):
            found.setdefault(row["queue"], {})[row["status"]] = row["n"]
        return found

    def ready(self, queues: Sequence[str], now: int) -> bool:
        """Whether a claim for these queues would find something now. Reads only."""
        if self._db.run("any_ready", queues=json.dumps(list(queues)))[0]["ready"]:
            return True
        due = self._db.run("next_due")[0]["due"]
        return due is not None and due <= now

    def needed(self, queues: Sequence[str], now: int) -> builtins.list[str]:
        """Those of the queues that have a job which could be claimed now, also one whose time has come. Reads only."""
        return [row["queue"] for row in self._db.run("needed_queues", queues=json.dumps(list(queues)), now=now)]

    def wanted_cancels(self, node: str) -> builtins.list[tuple[int, int]]:
        """Running claims (id, fence) of this node that somebody asked to cancel."""
        return [(row["id"], row["fence"]) for row in self._db.run("wanted_cancels", node=node)]

    def oldest(self) -> dict[str, int]:
        """Per queue: when the oldest of its jobs that are next in line was created."""
        return {row["queue"]: row["at"] for row in self._db.run("oldest_ready")}

    def live(self, ids: Sequence[int]) -> set[int]:
        """Which of these run or wait for another run: their scratch is not to be touched."""
        return {row["id"] for row in self._db.run("live_jobs", ids=json.dumps(list(ids)))}

    def ended(self, ids: Sequence[int]) -> set[int]:
        """Which of these are done, failed or cancelled, or are no more."""
        return {*ids} - {row["id"] for row in self._db.run("open_jobs", ids=json.dumps(list(ids)))}

    def newest_step(self, chain: int) -> int:
        """The job of the newest step of a chain that was stored; `chain` is the job of its first step."""
        rows = self._db.run("chain_newest", chain=chain)
        return int(rows[0]["id"]) if rows else chain

    def of_batch(self, batch: int, after: int, limit: int) -> builtins.list[tuple[int, bool]]:
        """The batch's jobs above `after`, oldest first, and whether each begins a chain."""
        rows = self._db.run("batch_jobs", batch=batch, after=after, limit=limit)
        return [(row["id"], row["chain"] is not None) for row in rows]

    def tasks(self) -> dict[str, dict[str, Any]]:
        """The declared tasks by name."""
        return {
            r["name"]: {**dict(r), "parameters": json.loads(r["parameters"]), "policy": json.loads(r["policy"])}
            for r in self._db.run("tasks")
        }


def _like(text: str) -> str:
    """A LIKE pattern for whatever contains the text."""
    escaped = re.sub(r"([\\%_])", r"\\\1", text)
    return f"%{escaped}%"


def _conditions(*, status: str | None, **filters: Any) -> tuple[list[str], dict[str, Any]]:
    """The named conditions of the filters that are given, and their values."""
    given = {name: value for name, value in filters.items() if value is not None}
    names = [f"of_{name}" for name in given] + (
        [f"status_{status if status == 'live' else JobStatus(status)}"] if status else []
    )
    return names, {name: json.dumps(value) if name == "ids" else value for name, value in given.items()}
