"""The verbs about jobs, each one transaction. The timeline is written in the transaction that changes the state."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from ostler.errors import Conflict, NotFound
from ostler.store.rows import Claim, Finish, JobStatus, NewJob, Note, Requeue, Taken, Turn
from ostler.store.sqlite import SqliteDatabase

_EVENT = tuple[int, int, int, str, str | None]  # job, seq, at, name, data


class JobRecords:
    """Jobs and their timeline in the store."""

    def __init__(self, db: SqliteDatabase) -> None:
        self._db = db

    # ---- producers

    def enqueue(self, jobs: Sequence[NewJob], now: int) -> list[int]:
        """Store all of them or none; when it returns, they survive a power cut (on a durable connection)."""
        batch = [[j.task, j.queue, j.args, j.priority, j.attempts, j.timeout, j.run_at] for j in jobs]
        with self._db.transaction():
            ids = sorted(row["id"] for row in self._db.run("enqueue", batch=json.dumps(batch), now=now))
            self._timeline((i, 1, now, "created", None) for i in ids)
        return ids

    # ---- the dispatcher

    def turn(self, turn: Turn) -> Taken:
        """Write what happened and claim for the free workers, in one transaction.

        A note, finish or requeue whose (id, fence) is no longer the current claim changes nothing and is named in `lost` (a note is just dropped).
        No job is claimed twice: the claim finds it queued under the write lock, or not at all.
        """
        lost: list[int] = []
        timeline: list[_EVENT] = []
        with self._db.transaction():
            self._note(turn.notes, timeline)
            self._finish(turn.finishes, timeline, lost)
            self._requeue(turn.requeues, turn.now, timeline, lost)
            claims = self._claim(turn, timeline) if turn.wants else []
            self._timeline(timeline)
            next_due = self._db.run("next_due")[0]["due"]
        return Taken(claims, lost, next_due)

    def _note(self, notes: list[Note], timeline: list[_EVENT]) -> None:
        if not notes:
            return
        held: dict[int, list[Note]] = {}
        for note in notes:
            held.setdefault(note.id, []).append(note)
        batch = []
        for job, rows in held.items():
            progress = next((n.progress for n in reversed(rows) if n.progress is not None), None)
            stage = next((n.stage for n in reversed(rows) if n.stage is not None), None)
            batch.append([job, rows[-1].fence, len(rows), progress, stage])
        for row in self._db.run("note", batch=json.dumps(batch)):
            rows = held[row["id"]]
            first = row["seq"] - len(rows) + 1
            timeline.extend((n.id, first + i, n.at, n.event, n.data) for i, n in enumerate(rows))

    def _finish(self, finishes: list[Finish], timeline: list[_EVENT], lost: list[int]) -> None:
        if not finishes:
            return
        by_id = {f.id: f for f in finishes}
        batch = [
            [f.id, f.fence, f.status, f.result, f.error, f.started_at, f.finished_at, f.crash, f.progress]
            for f in finishes
        ]
        for row in self._db.run("finish", batch=json.dumps(batch)):
            done = by_id.pop(row["id"])
            timeline.append((done.id, row["seq"], done.finished_at, done.event, done.data))
        lost.extend(by_id)

    def _requeue(self, requeues: list[Requeue], now: int, timeline: list[_EVENT], lost: list[int]) -> None:
        if not requeues:
            return
        by_id = {r.id: r for r in requeues}
        batch = [[r.id, r.fence, r.run_at, r.refund, r.crash, r.excused, r.error] for r in requeues]
        for row in self._db.run("requeue", batch=json.dumps(batch), now=now):
            back = by_id.pop(row["id"])
            event = "cancelled" if row["status"] == JobStatus.CANCELLED else back.event
            timeline.append((back.id, row["seq"], back.at, event, back.data))
        lost.extend(by_id)

    def _claim(self, turn: Turn, timeline: list[_EVENT]) -> list[Claim]:
        self._db.run("promote", now=turn.now)
        claims: list[Claim] = []
        for queue, workers in turn.wants.items():
            rows = self._db.run("claimable", queue=queue, limit=len(workers))
            claims += [
                Claim(
                    id=row["id"],
                    fence=row["fence"] + 1,
                    worker=worker,
                    task=row["task"],
                    queue=row["queue"],
                    args=row["args"],
                    attempt=row["attempt"] + 1,
                    attempts=row["attempts"],
                    crashes=row["crashes"],
                    excused=row["excused"],
                    timeout=row["timeout"],
                )
                for row, worker in zip(rows, workers, strict=False)
            ]
        if not claims:
            return claims
        by_id = {c.id: c for c in claims}
        batch = json.dumps([[c.id, c.worker] for c in claims])
        held = set()
        for row in self._db.run("claim", batch=batch, node=turn.node, now=turn.now):
            claim = by_id[row["id"]]
            held.add(claim.id)
            data = f'{{"attempt":{claim.attempt},"worker":{json.dumps(claim.worker)}}}'
            timeline.append((claim.id, row["seq"], turn.now, "processing", data))
        return [c for c in claims if c.id in held]

    def _timeline(self, events: Iterable[_EVENT]) -> None:
        batch = list(events)
        if batch:
            self._db.run_many("add_events", batch)

    def ready(self, queues: Sequence[str], now: int) -> bool:
        """Whether a claim for these queues would find something now. Reads only."""
        if self._db.run("any_ready", queues=json.dumps(list(queues)))[0]["ready"]:
            return True
        due = self._db.run("next_due")[0]["due"]
        return due is not None and due <= now

    def wanted_cancels(self, node: str) -> list[tuple[int, int]]:
        """Running claims (id, fence) of this node that somebody asked to cancel."""
        return [(row["id"], row["fence"]) for row in self._db.run("wanted_cancels", node=node)]

    def holds(self, job: int, fence: int) -> bool:
        """Whether this claim is still the job's, and nobody asked to cancel it."""
        return bool(self._db.run("holds", id=job, fence=fence))

    def recover(self, node: str, now: int, reason: str) -> list[int]:
        """Send the claims of a dead node back to the queue. Blames no job; harmless when done twice."""
        with self._db.transaction():
            rows = self._db.run("orphaned", node=node)
            data = json.dumps({"node": node, "reason": reason})
            timeline: list[_EVENT] = []
            back = [Requeue(row["id"], row["fence"], "requeued:stale", now, excused=1, data=data) for row in rows]
            self._requeue(back, now, timeline, [])
            self._timeline(timeline)
        return [row["id"] for row in rows]

    # ---- operators

    def get(self, job: int) -> dict[str, Any]:
        """The job with its timeline; raises NotFound."""
        rows = self._db.run("job", id=job)
        if not rows:
            raise NotFound(f"there is no job {job}")
        return {**_job(rows[0]), "events": self.events(job)}

    def events(self, job: int) -> list[dict[str, Any]]:
        """The job's timeline, oldest first."""
        return [
            {"seq": r["seq"], "at": r["at"], "name": r["name"], "data": json.loads(r["data"]) if r["data"] else None}
            for r in self._db.run("job_events", id=job)
        ]

    def list(
        self, *, status: str | None = None, queue: str | None = None, limit: int = 50, cursor: int | None = None
    ) -> tuple[list[dict[str, Any]], int | None]:
        """Newest first, and the cursor of the next page or None. Statuses stand in the SQL as text so that partial indexes serve."""
        where = ["1 = 1"]
        if status is not None:
            where.append(f"status = '{JobStatus(status)}'")
        if queue is not None:
            where.append("queue = :queue")
        if cursor is not None:
            where.append("id < :cursor")
        sql = f"SELECT * FROM jobs WHERE {' AND '.join(where)} ORDER BY id DESC LIMIT :limit"  # noqa: S608
        rows = self._db.query(sql, {"queue": queue, "cursor": cursor, "limit": limit + 1})
        page = [_job(row) for row in rows[:limit]]
        return page, (page[-1]["id"] if len(rows) > limit else None)

    def depths(self) -> dict[str, dict[str, int]]:
        """Per queue: queued, scheduled, processing, failed and cancelled."""
        found: dict[str, dict[str, int]] = {}
        for row in self._db.run("depths"):
            found.setdefault(row["queue"], {})[row["status"]] = row["n"]
        return found

    def cancel(self, job: int, now: int) -> str:
        """A queued job is cancelled at once; a running one is asked to stop. Returns the status found; Conflict when it has ended."""
        with self._db.transaction():
            for statement, event in (("cancel_queued", "cancelled"), ("cancel_running", "cancel:requested")):
                for row in self._db.run(statement, id=job, now=now):
                    self._timeline([(job, row["seq"], now, event, None)])
                    return str(JobStatus.QUEUED if event == "cancelled" else JobStatus.PROCESSING)
            status = str(self.get(job)["status"])
        if status == JobStatus.PROCESSING:  # asked before: still the same wish
            return status
        raise Conflict(f"job {job} is {status}; only a queued or processing job can be cancelled")

    def retry(self, job: int, now: int) -> str:
        """Put an ended job back into its queue with a fresh budget; returns the queue. Conflict while it is live."""
        with self._db.transaction():
            for row in self._db.run("retry", id=job):
                self._timeline([(job, row["seq"], now, "retried", None)])
                return str(row["queue"])
            status = self.get(job)["status"]
        raise Conflict(f"job {job} is {status}; only a done, failed or cancelled job can be retried")

    # ---- tasks

    def declare(self, tasks: Iterable[dict[str, Any]], now: int) -> None:
        """Record what the node's app declares, so that every producer can check against it."""
        with self._db.transaction():
            for task in tasks:
                self._db.run("declare_task", **task, now=now)

    def tasks(self) -> dict[str, dict[str, Any]]:
        """The declared tasks by name."""
        return {r["name"]: {**dict(r), "parameters": json.loads(r["parameters"])} for r in self._db.run("tasks")}


def _job(row: Any) -> dict[str, Any]:
    """A row as the API shows it."""
    error = json.loads(row["error"]) if row["error"] else None
    return {
        "id": row["id"],
        "task": row["task"],
        "queue": row["queue"],
        "status": row["status"],
        "args": json.loads(row["args"]),
        "priority": row["priority"],
        "attempt": row["attempt"],
        "attempts": row["attempts"],
        "crashes": row["crashes"],
        "timeout": row["timeout"],
        "progress": row["progress"],
        "stage": row["stage"],
        "result": json.loads(row["result"]) if row["result"] is not None else None,
        "error": error,
        "worker": row["worker"],
        "node": row["node"],
        "cancel_requested": bool(row["cancel"]),
        "run_at": row["run_at"],
        "created_at": row["created_at"],
        "started_at": row["started_at"],
        "finished_at": row["finished_at"],
    }
