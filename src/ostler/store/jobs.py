"""The verbs about jobs, each one transaction. The timeline is written in the transaction that changes the state."""

from __future__ import annotations

import builtins
import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ostler.errors import Conflict, NotFound
from ostler.store import limits, views
from ostler.store.flows import Flows
from ostler.store.live import Counts, Tallies, bin_of
from ostler.store.retention import Retention
from ostler.store.rows import Claim, Finish, JobStatus, NewJob, Note, Requeue, Taken, Turn
from ostler.store.sqlite import SqliteDatabase

_REQUEUED = {"requeued:retry": "retried", "requeued:crash": "crashed"}  # events that are counted
_LARGEST = 2**63 - 1  # the largest number that the store can hold
EVENTS = 200  # entries of a page of a timeline, where nobody says how many
_EVENT_BYTES = 524_288  # of their data in one page
_EVENTS_AT_ONCE = 20
_QUEUED, _SCHEDULED, _PROCESSING = "queued", "scheduled", "processing"  # states that are counted
_SEARCHED = 20_000  # jobs that one page of a search looks at
_EVENT = tuple[int, int, int, str, str | None]  # job, seq, at, name, data


class JobRecords:
    """Jobs and their timeline in the store."""

    def __init__(self, db: SqliteDatabase) -> None:
        self._db = db
        self.flows = Flows(db, self._insert, self._put_unique)
        self.retention = Retention(db, self._moved)
        self._tallies = Tallies(db)

    # ---- producers

    def enqueue(self, jobs: Sequence[NewJob], now: int) -> list[int]:
        """Store all of them or none; when it returns, they survive a power cut (on a durable connection).

        Returns an id for each, in order: that of the job which already holds its unique key, where there is one.
        """
        return [job for job, _ in self.put(jobs, now)]

    def put(self, jobs: Sequence[NewJob], now: int) -> list[tuple[int, bool]]:
        """`enqueue`, telling for each whether it is new."""
        with self._db.transaction():
            if not any(job.unique_key for job in jobs):
                return [(job, True) for job in self._insert(jobs, now)]
            return [self._put_unique(job, now) for job in jobs]

    def _put_unique(self, job: NewJob, now: int) -> tuple[int, bool]:
        if job.unique_key is None:
            return self._insert([job], now)[0], True
        for row in self._db.run("unique_holder", key=job.unique_key, now=now):
            if job.next is not None:
                raise Conflict(
                    f"job {row['job']} holds the unique key of the first step of this chain; the chain was not stored"
                )
            return int(row["job"]), False
        stored = self._insert([job], now)[0]
        until = None if job.unique_for is None else now + int(job.unique_for * 1000)
        self._db.run("unique_set", key=job.unique_key, job=stored, until=until)
        return stored, True

    def _insert(self, jobs: Sequence[NewJob], now: int) -> list[int]:
        """Rows, in the transaction that is open. Each is its own `created` event, number 1 of its timeline."""
        ids = self._db.insert("enqueue", [(*job, now) for job in jobs])
        limits.put_heads(self._db, {(j.queue, j.limit_key) for j in jobs if j.limit_key is not None})
        moved: dict[tuple[str, str], int] = {}
        for job, stored in zip(jobs, ids, strict=True):
            key = (job.queue, _SCHEDULED if job.run_at is not None and job.run_at > now else _QUEUED)
            moved[key] = moved.get(key, 0) + 1
            if job.next is not None:
                self.flows.begin(stored, json.loads(job.next))
        self._moved(moved)
        return ids

    # ---- the dispatcher

    def turn(self, turn: Turn) -> Taken:
        """Write what happened and claim for the free workers, in one transaction.

        A note, finish or requeue whose (id, fence) is no longer the current claim changes nothing and is named in `lost` (a note is just dropped).
        No job is claimed twice: the claim finds it queued under the write lock, or not at all.
        """
        lost: list[int] = []
        timeline: list[_EVENT] = []
        counts: Counts = {}
        with self._db.transaction():
            self._note(turn.notes, timeline)
            self._finish(turn.finishes, turn.now, timeline, lost, counts)
            self._requeue(turn.requeues, turn.now, timeline, lost, counts)
            claims, dues, missed = self._claim(turn, timeline, counts) if turn.wants else ([], [], 0)
            self._timeline(timeline)
            self._tallies.add(counts, turn.now)
            dues.append(self._db.run("next_due")[0]["due"])
        return Taken(claims, lost, min((d for d in dues if d is not None), default=None), missed)

    def _note(self, notes: list[Note], timeline: list[_EVENT]) -> None:
        if not notes:
            return
        held: dict[tuple[int, int], list[Note]] = {}
        for note in notes:
            held.setdefault((note.id, note.fence), []).append(note)
        batch = []
        for (job, fence), rows in held.items():
            progress = next((n.progress for n in reversed(rows) if n.progress is not None), None)
            stage = next((n.stage for n in reversed(rows) if n.stage is not None), None)
            batch.append([job, fence, len(rows), progress, stage])
        for row in self._db.run("note", batch=json.dumps(batch)):
            rows = held[row["id"], row["fence"]]
            first = row["seq"] - len(rows) + 1
            timeline.extend((n.id, first + i, n.at, n.event, n.data) for i, n in enumerate(rows))

    def _finish(
        self, finishes: list[Finish], now: int, timeline: list[_EVENT], lost: list[int], counts: Counts
    ) -> None:
        if not finishes:
            return
        by_id = {f.id: f for f in finishes}
        batch = [
            [f.id, f.fence, f.status, f.result, f.error, f.started_at, f.finished_at, f.crash, f.progress]
            for f in finishes
        ]
        followed = []
        ended: list[tuple[str, str]] = []
        runs: dict[str, list[int]] = {}  # queue -> how long each run that is done took
        for row in self._db.run("finish", batch=json.dumps(batch)):
            id_, seq, queue, status, of_batch, following, chain, *_ = row  # in the statement's order
            done = by_id.pop(id_)
            ended.append((queue, status))
            timeline.append((id_, seq, done.finished_at, done.event, done.data))
            if status == JobStatus.DONE:
                runs.setdefault(queue, []).append(max(0, done.finished_at - done.started_at))
            if done.crash:
                _count(counts, queue, "crashed")
            if chain is not None or following or of_batch is not None:
                followed.append(row)
        lost.extend(by_id)
        for queue, took in runs.items():
            _count(counts, queue, "run_ms", sum(took))
            for ms, n in Counter(took).items():
                _count(counts, queue, f"run:{bin_of(ms)}", n)
        moved: Counter[tuple[str, str]] = Counter(ended)
        for (queue, status), n in [*moved.items()]:
            _count(counts, queue, status, n)
            moved[queue, _PROCESSING] -= n
        self._moved(moved)
        if followed:
            self.flows.ended(followed, now)

    def _requeue(
        self, requeues: list[Requeue], now: int, timeline: list[_EVENT], lost: list[int], counts: Counts
    ) -> None:
        if not requeues:
            return
        by_id = {r.id: r for r in requeues}
        batch = [[r.id, r.fence, r.run_at, r.refund, r.crash, r.excused, r.error, r.last] for r in requeues]
        limited: set[limits.Key] = set()
        moved: Counter[tuple[str, str]] = Counter()
        for row in self._db.run("requeue", batch=json.dumps(batch), now=now):
            back = by_id.pop(row["id"])
            moved[row["queue"], _PROCESSING] -= 1
            moved[row["queue"], _state(row)] += 1
            event = back.event
            if name := _REQUEUED.get(event):
                _count(counts, row["queue"], name)
            if row["status"] == JobStatus.CANCELLED:
                event = "cancelled"
                _count(counts, row["queue"], event)
                if row["batch"] is not None:
                    self.flows.ended([row], now)
            timeline.append((back.id, row["seq"], back.at, event, back.data))
            if row["limit_key"] is not None:
                limited.add((row["queue"], row["limit_key"]))
        lost.extend(by_id)
        self._moved(moved)
        limits.put_heads(self._db, limited)

    def _claim(self, turn: Turn, timeline: list[_EVENT], counts: Counts) -> tuple[list[Claim], list[int | None], int]:
        """(claims, times at which a rate allows more, how many were picked and not to be had)."""
        promoted = self._db.run("promote", now=turn.now)
        limits.put_heads(self._db, {(r["queue"], r["limit_key"]) for r in promoted if r["limit_key"] is not None})
        moved: Counter[tuple[str, str]] = Counter()
        for row in promoted:
            moved[row["queue"], _SCHEDULED] -= 1
            moved[row["queue"], _QUEUED] += 1
        claims: list[Claim] = []
        dues: list[int | None] = []
        keys = limits.Keys(self._db)  # counted once for the whole turn: a key may have jobs in several queues
        for queue, workers in turn.wants.items():
            limit = turn.limits.get(queue)
            count, due = len(workers), None
            if limit is not None:
                count, due = limits.allowed(self._db, queue, limit, count, turn.now)
            rows = keys.pick(queue, count) if count else []
            if limit is not None:
                if len(rows) == count:
                    dues.append(due)  # the rate is what held back
                limits.spend(self._db, queue, limit, len(rows), turn.now)
            claims += [_claimed(row, worker) for row, worker in zip(rows, workers, strict=False)]
            waited = [turn.now - row["since"] for row in rows if row["attempt"] == 0]  # for their first run
            for ms, n in Counter(waited).items():
                _count(counts, queue, f"wait:{bin_of(ms)}", n)
        if not claims:
            self._moved(moved)
            return claims, dues, 0
        by_id = {c.id: c for c in claims}
        held: set[int] = set()
        names = {worker: json.dumps(worker) for worker in {c.worker for c in claims}}
        for row in self._db.run(
            "claim", batch=json.dumps([[c.id, c.worker] for c in claims]), node=turn.node, now=turn.now
        ):
            id_, seq = row
            claim = by_id[id_]
            held.add(id_)
            data = f'{{"attempt":{claim.attempt},"worker":{names[claim.worker]}}}'
            timeline.append((id_, seq, turn.now, "processing", data))
        limits.put_heads(self._db, keys.picked)
        taken = [c for c in claims if c.id in held]
        for queue, n in Counter([c.queue for c in taken]).items():
            moved[queue, _QUEUED] -= n
            moved[queue, _PROCESSING] += n
        self._moved(moved)
        return taken, dues, len(claims) - len(held)

    def _timeline(self, events: Iterable[_EVENT]) -> None:
        batch = list(events)
        if batch:
            self._db.run_many("add_events", batch)

    def _moved(self, moves: Mapping[tuple[str, str], int]) -> None:
        """So many jobs of a queue entered or left a state, in the transaction that is open."""
        rows = [(queue, state, n) for (queue, state), n in moves.items() if n and state != JobStatus.DONE]
        if rows:
            self._db.run_many("depth_add", rows)

    def ready(self, queues: Sequence[str], now: int) -> bool:
        """Whether a claim for these queues would find something now. Reads only."""
        if self._db.run("any_ready", queues=json.dumps(list(queues)))[0]["ready"]:
            return True
        due = self._db.run("next_due")[0]["due"]
        return due is not None and due <= now

    def wanted_cancels(self, node: str) -> list[tuple[int, int]]:
        """Running claims (id, fence) of this node that somebody asked to cancel."""
        return [(row["id"], row["fence"]) for row in self._db.run("wanted_cancels", node=node)]

    def hold(self, job: int, fence: int) -> bool:
        """Whether this claim is still the job's, and nobody asked to cancel it: asked before what cannot be undone.

        On a durable connection the answer is synced, and with it every commit before it, also those of other connections: no id
        and no fence that a publish is about to put on disk can roll back in a power cut.
        """
        return bool(self._db.run("hold", id=job, fence=fence))

    def recover(self, node: str, now: int, reason: str) -> list[int]:
        """Send the claims of a dead node back to the queue. Blames no job; harmless when done twice."""
        with self._db.transaction():
            rows = self._db.run("orphaned", node=node)
            data = json.dumps({"node": node, "reason": reason})
            timeline: list[_EVENT] = []
            back = [Requeue(row["id"], row["fence"], "requeued:stale", now, excused=1, data=data) for row in rows]
            counts: Counts = {}
            self._requeue(back, now, timeline, [], counts)
            self._timeline(timeline)
            self._tallies.add(counts, now)
        return [row["id"] for row in rows]

    # ---- operators

    def find(self, job: int) -> dict[str, Any]:
        """The job; raises NotFound."""
        rows = self._db.run("job", id=job) if job <= _LARGEST else []
        if not rows:
            raise NotFound(f"there is no job {job}")
        return views.job(rows[0])

    def get(self, job: int) -> dict[str, Any]:
        """The job with the newest page of its timeline; raises NotFound."""
        return {**self.find(job), "events": self.newest_events(job)}

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
        where, values = _where(status=status, queue=queue, task=task, code=code, batch=batch)
        if cursor is not None:
            where += " AND id < :cursor"
        floor = 0
        if search:
            top = cursor if cursor is not None else self._db.run("newest_ids", after=0, limit=1)
            newest = top if isinstance(top, int) else (top[0]["id"] + 1 if top else 0)
            floor = max(0, newest - _SEARCHED)
            where += (
                " AND id >= :floor AND (CAST(id AS TEXT) = :search OR task LIKE :like ESCAPE '\\' OR args LIKE :like ESCAPE '\\'"
                " OR args LIKE :coded ESCAPE '\\' OR error LIKE :like ESCAPE '\\' OR error LIKE :coded ESCAPE '\\')"
            )
            coded = json.dumps(search)[1:-1]  # as it stands in arguments and errors: JSON in ASCII
            values |= {"floor": floor, "search": search.strip(), "like": _like(search), "coded": _like(coded)}
        sql = f"SELECT id FROM jobs WHERE {where} ORDER BY id DESC LIMIT :limit"  # noqa: S608  see _where
        rows = self._db.query(sql, {**values, "cursor": cursor, "limit": limit + 1})
        page = self.short(row["id"] for row in rows[:limit])[::-1]
        if len(rows) > limit:
            return page, rows[limit - 1]["id"]
        return page, (floor or None)

    def matching(self, statuses: Sequence[str], limit: int, **filters: Any) -> builtins.list[int]:
        """Ids of jobs with one of these statuses that the filters fit, oldest first."""
        where, values = _where(**filters)
        shown = ", ".join(f"'{JobStatus(s)}'" for s in statuses)
        sql = f"SELECT id FROM jobs WHERE status IN ({shown}) AND {where} ORDER BY id LIMIT :limit"  # noqa: S608
        return [row["id"] for row in self._db.query(sql, {**values, "limit": limit})]

    def depths(self) -> dict[str, dict[str, int]]:
        """Per queue: queued, scheduled, processing, failed and cancelled."""
        found: dict[str, dict[str, int]] = {}
        for row in self._db.run("depths"):
            found.setdefault(row["queue"], {})[row["status"]] = row["n"]
        return found

    def cancel(self, job: int, now: int) -> str:
        """A queued job is cancelled at once; a running one is asked to stop. Returns the status found; Conflict when it has ended."""
        with self._db.transaction():
            return self._cancel(job, now)

    def _cancel(self, job: int, now: int) -> str:
        for statement, event in (("cancel_queued", "cancelled"), ("cancel_running", "cancel:requested")):
            for row in self._db.run(statement, id=job, now=now):
                self._timeline([(job, row["seq"], now, event, None)])
                if event == "cancelled":
                    before = _SCHEDULED if row["later"] else _QUEUED
                    self._moved({(row["queue"], before): -1, (row["queue"], event): 1})
                    if row["limit_key"] is not None:
                        limits.put_heads(self._db, {(row["queue"], row["limit_key"])})
                    self._tallies.add({(row["queue"], event): 1}, now)
                if event == "cancelled" and row["batch"] is not None:
                    self.flows.ended([row], now)
                return str(JobStatus.QUEUED if event == "cancelled" else JobStatus.PROCESSING)
        status = str(self.find(job)["status"])
        if status == JobStatus.PROCESSING:  # asked before: still the same wish
            return status
        raise Conflict(f"job {job} is {status}; only a queued or processing job can be cancelled")

    def retry(self, job: int, now: int) -> str:
        """Put an ended job back into its queue with a fresh budget; returns the queue. Conflict while it is live, or when another
        job holds its unique key.
        """
        with self._db.transaction():
            return self._retry(job, now)

    def _retry(self, job: int, now: int) -> str:
        found = self.find(job)
        if found["unique_key"] is not None and found["status"] not in (JobStatus.QUEUED, JobStatus.PROCESSING):
            for row in self._db.run("unique_holder", key=found["unique_key"], now=now):
                if row["job"] != job:
                    raise Conflict(f"job {job} cannot be retried: job {row['job']} holds its unique key")
            self._db.run("unique_set", key=found["unique_key"], job=job, until=None)
        for row in self._db.run("retry", id=job):
            self._timeline([(job, row["seq"], now, "retried", None)])
            self._moved({(row["queue"], found["status"]): -1, (row["queue"], _QUEUED): 1})
            if row["limit_key"] is not None:
                limits.put_heads(self._db, {(row["queue"], row["limit_key"])})
            if row["batch"] is not None:
                self.flows.put_back(row["batch"], found["status"])
            return str(row["queue"])
        raise Conflict(f"job {job} is {found['status']}; only a done, failed or cancelled job can be retried")

    def cancel_many(self, now: int, limit: int, **filters: Any) -> dict[int, str]:
        """Cancel the live jobs that the filters fit; the status found of each. What ends meanwhile is passed over."""
        return self._many(("queued", "processing"), limit, filters, lambda job: self._cancel(job, now))

    def retry_many(self, now: int, limit: int, status: str, **filters: Any) -> dict[int, str]:
        """Retry the ended jobs that the filters fit; the queue of each. What cannot be retried is passed over."""
        return self._many((status,), limit, filters, lambda job: self._retry(job, now))

    def _many(
        self, statuses: Sequence[str], limit: int, filters: dict[str, Any], verb: Callable[[int], str]
    ) -> dict[int, str]:
        done: dict[int, str] = {}
        ids = self.matching(statuses, limit, **filters)
        for start in range(0, len(ids), 500):  # short transactions: others write too
            with self._db.transaction():
                for job in ids[start : start + 500]:
                    with contextlib.suppress(Conflict, NotFound):
                        done[job] = verb(job)
        return done

    def depth_up_to(self, limit: int) -> int:
        """How many jobs are ready, counted no further than `limit`."""
        return int(self._db.run("depth_up_to", limit=limit)[0]["n"])

    def oldest(self) -> dict[str, int]:
        """Per queue: when the oldest of its jobs that are next in line was created."""
        return {row["queue"]: row["at"] for row in self._db.run("oldest_ready")}

    def live(self, ids: Sequence[int]) -> set[int]:
        """Which of these run or wait for another run: their scratch is not to be touched."""
        return {row["id"] for row in self._db.run("live_jobs", ids=json.dumps(list(ids)))}

    # ---- tasks

    def declare(self, tasks: Iterable[dict[str, Any]], now: int) -> None:
        """Record what the node's app declares, so that every producer can check against it."""
        with self._db.transaction():
            for task in tasks:
                self._db.run("declare_task", **task, now=now)

    def tasks(self) -> dict[str, dict[str, Any]]:
        """The declared tasks by name."""
        return {
            r["name"]: {**dict(r), "parameters": json.loads(r["parameters"]), "policy": json.loads(r["policy"])}
            for r in self._db.run("tasks")
        }


def _state(row: Any) -> str:
    return _SCHEDULED if row["status"] == _QUEUED and row["later"] else str(row["status"])


def _count(counts: Counts, queue: str, name: str, n: int = 1) -> None:
    key = (queue, name)
    counts[key] = counts.get(key, 0) + n


def _like(text: str) -> str:
    """A LIKE pattern for whatever contains the text."""
    escaped = re.sub(r"([\\%_])", r"\\\1", text)
    return f"%{escaped}%"


def _where(**filters: Any) -> tuple[str, dict[str, Any]]:
    """Conditions for the filters that are given. A status stands in the SQL as text, so that partial indexes serve."""
    parts, values = ["1 = 1"], {}
    for name, value in filters.items():
        if value is None:
            continue
        if name == "status":
            parts.append(f"status = '{JobStatus(value)}'")
        elif name == "ids":
            parts.append("id IN (SELECT value FROM json_each(:ids))")
            values["ids"] = json.dumps(value)
        elif name == "code":
            parts.append("json_extract(error, '$.code') = :code")
            values["code"] = value
        else:
            parts.append(f"{name} = :{name}")
            values[name] = value
    return " AND ".join(parts), values


def _claimed(row: Any, worker: str) -> Claim:
    """The columns stand in the statement in the order in which they are named here."""
    id_, task, queue, args, attempts, attempt, crashes, excused, fence, timeout, backoff, *_ = row
    return Claim(id_, fence + 1, worker, task, queue, args, attempt + 1, attempts, crashes, excused, timeout, backoff)
