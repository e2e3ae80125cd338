"""The writing verbs about jobs, each one transaction; those that only read are in reading.py.

The timeline is written in the transaction that changes the state.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ostler.errors import Conflict, NotFound
from ostler.store import limits
from ostler.store.database import Database
from ostler.store.flows import Flows
from ostler.store.frontier import Frontier
from ostler.store.identity import LIVE, lost_node, name_of
from ostler.store.live import Counts, Tallies, bin_of
from ostler.store.reading import ERRORS, JobReading
from ostler.store.retention import Retention
from ostler.store.rows import Claim, Existing, Finish, JobStatus, NewJob, Note, Requeue, Taken, Turn
from ostler.store.schedules import Schedules

_REQUEUED = {"requeued:retry": "retried", "requeued:crash": "crashed"}  # events that are counted
_QUEUED, _SCHEDULED, _PROCESSING = "queued", "scheduled", "processing"  # states that are counted
_BUSY = 5  # milliseconds after which a queue is looked at again whose limits another node was counting
_EVENT = tuple[int, int, int, str, str | None]  # job, seq, at, name, data
_ERROR = tuple[int, int, int, str | None, str]  # job, seq, at, node, data


class JobRecords(JobReading):
    """Jobs and their timeline in the store."""

    def __init__(self, db: Database) -> None:
        super().__init__(db)
        self.flows = Flows(db, self._insert, self._put_unique, self._lock_unique, self._settle)
        self.schedules = Schedules(db, self._put_unique, self._lock_unique, self._settle)
        self.retention = Retention(db, self._moved, self.artifacts)
        self._tallies = Tallies(db)
        self._unsettled: set[limits.Key] = set()  # limit keys under which the open transaction changed what waits
        self._frontier = Frontier(whole=not db.shared)
        self._gathered: Counter[tuple[str, str]] | None = None  # the moves of the turn that is under way
        # A node, and the queues for which it has idle workers, as its row says.
        self._waits: tuple[str, list[str]] = ("", [])
        self._errors: list[_ERROR] = []  # of runs that the open transaction ends

    # ---- producers

    def enqueue(self, jobs: Sequence[NewJob], now: int) -> list[int]:
        """Store all of them or none; when it returns, they survive a power cut (on a durable connection).

        Returns an id for each, in order: as `Existing` that of the job which already holds its unique key, where there is one.
        """
        if len(jobs) == 1 and (job := jobs[0]).unique_key is job.limit_key is job.next is None:  # the usual case
            return self._db.insert("enqueue", [(*job, now)], rings=True)
        return [stored if new else Existing(stored) for stored, new in self.put(jobs, now)]

    def put(self, jobs: Sequence[NewJob], now: int) -> list[tuple[int, bool]]:
        """`enqueue`, telling for each whether it is new."""
        with self._db.transaction():
            if any(job.unique_key for job in jobs):
                self._lock_unique(job.unique_key for job in jobs)
                stored = [self._put_unique(job, now) for job in jobs]
            else:
                stored = [(job, True) for job in self._insert(jobs, now)]
            self._settle()
            self._db.ring({job.queue for job in jobs})
        return stored

    def _lock_unique(self, keys: Iterable[str | None]) -> None:
        self._db.lock(sorted({f"unique:{key}" for key in keys if key is not None}))

    def _settle(self) -> None:
        """Before the transaction ends: the first job of each limit key that it touched is in the ready index."""
        keys, self._unsettled = self._unsettled, set()
        limits.put_heads(self._db, keys)

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
        self._db.tell("unique_set", key=job.unique_key, job=stored, until=until)
        return stored, True

    def _insert(self, jobs: Sequence[NewJob], now: int) -> list[int]:
        """Rows, in the transaction that is open. Each is its own `created` event, number 1 of its timeline."""
        ids = self._db.insert("enqueue", [(*job, now) for job in jobs])
        self._unsettled.update((j.queue, j.limit_key) for j in jobs if j.limit_key is not None)
        moved: dict[tuple[str, str], int] = {}
        for job, stored in zip(jobs, ids, strict=True):
            key = (job.queue, _state_of(job, now))
            moved[key] = moved.get(key, 0) + 1
            if job.next is not None:
                self.flows.begin(stored, json.loads(job.next))
        if self._db.shared:
            self._moved(moved)
        return ids

    def _count_new(self) -> None:
        """Jobs that were stored since the last look are counted, before anything happens to them. Others count them at once."""
        if not self._db.shared and self._db.run("count_new"):
            self._db.run("counted")

    def recount(self) -> None:
        """Count the depths anew from the rows; where one node has the store to itself."""
        if not self._db.shared:
            with self._db.transaction():
                self._db.run("depths_clear")
                self._db.run("depths_fill")
                self._db.run("counted")

    # ---- the dispatcher

    def turn(self, turn: Turn) -> Taken:
        """Write what happened and claim for the free workers, in one transaction.

        A note, finish or requeue whose (id, fence) is no longer the current claim changes nothing and is named in `lost` (a note is just dropped).
        No job is claimed twice: the claim finds it queued and holds its row, or it does not get it. Raises NodeLost when the node was
        declared dead; then nothing was written.
        """
        try:
            return self._turn(turn)
        finally:
            self._gathered = None
            self._errors = []

    def _turn(self, turn: Turn) -> Taken:
        lost: list[int] = []
        timeline: list[_EVENT] = []
        counts: Counts = {}
        moved: Counter[tuple[str, str]] = Counter()
        with self._db.transaction():
            begun = self._begin(turn) if turn.number else self._db.run("next_due")
            if not begun:
                return Taken(self._claims_of(turn.node), [], turn.now, replayed=True)
            due = begun[0]["due"]
            self._gathered = moved
            self._count_new()
            self._note(turn.notes, timeline)
            self._finish(turn, timeline, lost, counts)
            self._requeue(turn.requeues, turn.node, turn.now, timeline, lost, counts)
            if turn.finishes or turn.requeues:  # which may have scheduled another
                due = self._db.run("next_due")[0]["due"]
            if turn.wants and due is not None and due <= turn.now:
                self._promote(turn.now)
                due = self._db.run("next_due")[0]["due"]
            self._settle()  # before the claims: those take locks without waiting
            claims, dues, missed = self._claim(turn, counts) if turn.wants else ([], [], 0)
            self._settle()
            self._timeline(timeline)
            self._keep_errors()
            self._tallies.add(counts, turn.now)
            dues.append(due)
            self._gathered = None
            self._moved(moved)
            waits = self._tell_waits(turn, claims) if turn.number and self._db.shared else self._waits
        again = waits[0] == turn.node and not set(waits[1]) <= set(self._waits_of(turn.node))
        self._waits = waits
        return Taken(claims, lost, min((d for d in dues if d is not None), default=None), missed, again=again)

    def _begin(self, turn: Turn) -> list[Any]:
        """When the next job is `due`; nothing when the turn is not new. Raises NodeLost when the node does not live."""
        if found := self._db.run("node_turn", id=turn.node, turn=turn.number, now=self._db.now()):
            return found
        rows = self._db.run("node", id=turn.node)
        if not rows or rows[0]["status"] not in LIVE:
            raise lost_node(turn.node)
        return []

    def _claims_of(self, node: str) -> list[Claim]:
        """Everything that the node holds, as the store has it."""
        return [Claim(*row) for row in self._db.run("claims_of", node=node)]

    def _tell_waits(self, turn: Turn, claims: list[Claim]) -> tuple[str, list[str]]:
        """Say for which queues workers are idle now: who stores a job wakes only those who wait for it.

        Where a queue is new among them, look once more: a job that was stored meanwhile rang for nobody.
        """
        got = Counter(claim.queue for claim in claims)
        waits = sorted(queue for queue, workers in turn.wants.items() if got[queue] < len(workers))
        if waits != self._waits_of(turn.node):
            self._db.tell("node_waits", id=turn.node, waits=json.dumps(waits))
        return turn.node, waits

    def _waits_of(self, node: str) -> list[str]:
        return self._waits[1] if self._waits[0] == node else []

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
            if published := [n.artifact for n in rows if n.artifact is not None]:
                self.artifacts.add(published)

    def _finish(self, turn: Turn, timeline: list[_EVENT], lost: list[int], counts: Counts) -> None:
        finishes = turn.finishes
        if not finishes:
            return
        by_id = {f.id: f for f in finishes}
        followed = []
        ended: list[tuple[str, str]] = []
        awaited: list[int] = []
        runs: dict[str, list[int]] = {}  # queue -> how long each run that is done took
        for row in self._ended(finishes):
            id_, seq, queue, status, of_batch, following, chain, *_ = row  # in the statement's order
            done = by_id.pop(id_)
            ended.append((queue, status))
            if row["awaited"]:
                awaited.append(id_)
            if status != JobStatus.DONE:  # that the row tells by itself
                timeline.append((id_, seq, done.finished_at, done.event, done.data))
                self._failed(done, seq, done.finished_at, turn.node)
            else:
                runs.setdefault(queue, []).append(max(0, done.finished_at - done.started_at))
            if done.crash:
                _count(counts, queue, "crashed")
            if chain is not None or following or of_batch is not None:
                followed.append(row)
        lost.extend(by_id)
        if awaited:  # who begins to wait just now looks again soon
            self._db.tell_ended(awaited)
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
            self.flows.ended(followed, turn.now)

    def _ended(self, finishes: list[Finish]) -> Iterator[Any]:
        """Write the ends of jobs; the rows of those whose claim was still theirs."""
        plain, other = [], []
        for f in finishes:
            if f.status == JobStatus.DONE and f.error is None and f.progress is None and not f.crash:
                plain.append((f.id, f.fence, f.result, f.started_at, f.finished_at))
            else:
                times = f.started_at, f.finished_at
                other.append((f.id, f.fence, f.status, f.result, f.error, *times, f.crash, f.progress))
        for statement, batch in (("finish_done", plain), ("finish", other)):
            if batch:
                yield from self._db.run(statement, batch=json.dumps(batch))

    def _requeue(
        self, requeues: list[Requeue], node: str, now: int, timeline: list[_EVENT], lost: list[int], counts: Counts
    ) -> None:
        if not requeues:
            return
        by_id = {r.id: r for r in requeues}
        batch = [[r.id, r.fence, r.run_at, r.refund, r.crash, r.excused, r.error, r.last] for r in requeues]
        moved: Counter[tuple[str, str]] = Counter()
        self._db.run("keep_events", ids=json.dumps([*by_id]))
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
                self._db.tell_ended([back.id])
                if row["batch"] is not None:
                    self.flows.ended([row], now)
            timeline.append((back.id, row["seq"], back.at, event, back.data))
            self._failed(back, row["seq"], back.at, node)
            if row["limit_key"] is not None:
                self._unsettled.add((row["queue"], row["limit_key"]))
        lost.extend(by_id)
        self._moved(moved)
        for queue in {queue for queue, _ in moved}:
            self._frontier.forget(queue)
        self._db.ring({queue for queue, _ in moved}, others=True)

    def _promote(self, now: int) -> None:
        """Scheduled jobs whose time has come wait in their queue."""
        promoted = self._db.run("promote", now=now)
        self._unsettled.update((r["queue"], r["limit_key"]) for r in promoted if r["limit_key"] is not None)
        for queue, n in Counter(row["queue"] for row in promoted).items():
            self._frontier.forget(queue)
            self._moved({(queue, _SCHEDULED): -n, (queue, _QUEUED): n})

    def _claim(self, turn: Turn, counts: Counts) -> tuple[list[Claim], list[int | None], int]:
        """(claims, times at which a rate allows more, how many were picked and not to be had)."""
        claims: list[Claim] = []
        dues: list[int | None] = []
        tasks = None if turn.tasks is None else json.dumps(sorted(turn.tasks))
        keys = limits.Keys(
            self._db, self._frontier, tasks
        )  # counted once for the whole turn: a key may have jobs in several queues
        for queue, workers in turn.wants.items():
            limit = turn.limits.get(queue)
            count, due = len(workers), None
            if limit is not None:
                if not self._db.try_lock(f"queue:{queue}"):
                    dues.append(turn.now + _BUSY)  # another node counts there
                    continue
                count, due = limits.allowed(self._db, queue, limit, count, turn.now)
            rows = keys.pick(queue, count) if count else []
            if limit is not None:
                if len(rows) == count:
                    dues.append(due)  # the rate is what held back
                limits.spend(self._db, queue, limit, len(rows), turn.now)
            if len(rows) < len(workers) and (wait := self._frontier.wait(queue)) is not None:
                dues.append(turn.now + int(wait * 1000) + 1)
            claims += [_claimed(row, worker) for row, worker in zip(rows, workers, strict=False)]
            waited = [turn.now - row["since"] for row in rows if row["attempt"] == 0]  # for their first run
            for ms, n in Counter(waited).items():
                _count(counts, queue, f"wait:{bin_of(ms)}", n)
        if keys.passed_over:
            dues.append(turn.now + _BUSY)
        if not claims:
            return claims, dues, 0
        batch = json.dumps({c.id: c.worker for c in claims})
        held = {row[0] for row in self._db.run("claim", batch=batch, node=turn.node, now=turn.now)}
        self._unsettled |= keys.picked
        taken = [c for c in claims if c.id in held]
        for queue, n in Counter([c.queue for c in taken]).items():
            self._moved({(queue, _QUEUED): -n, (queue, _PROCESSING): n})
        return taken, dues, len(claims) - len(held)

    def _timeline(self, events: Iterable[_EVENT]) -> None:
        batch = list(events)
        if batch:
            self._db.run_many("add_events", batch)

    def _failed(self, end: Finish | Requeue, seq: int, at: int, node: str) -> None:
        if end.failure is not None:
            self._errors.append((end.id, seq, at, name_of(node), end.failure))
            if end.fence > ERRORS:  # it has not had so many runs before
                self._db.tell("errors_old", job=end.id, kept=ERRORS - 1)

    def _keep_errors(self) -> None:
        errors, self._errors = self._errors, []
        if errors:
            self._db.run_many("add_errors", errors)

    def _moved(self, moves: Mapping[tuple[str, str], int]) -> None:
        """So many jobs of a queue entered or left a state, in the transaction that is open. A turn writes all of its own at once."""
        if self._gathered is not None:
            self._gathered.update(moves)
            return
        rows = [(queue, state, n) for (queue, state), n in moves.items() if n and state != JobStatus.DONE]
        if rows:
            self._db.run_many("depth_add", rows)

    def hold(self, job: int, fence: int, key: str | None = None, home: str = "") -> bool:
        """Whether this claim is still the job's, and nobody asked to cancel it: asked before what cannot be undone.

        On a durable connection the answer is synced, and with it every commit before it, also those of other connections: no id
        and no fence that a publish is about to put on disk can roll back in a power cut. With the `key` of such a publish, that is
        written down in the same transaction, so that its file goes with the job, whatever becomes of the run.
        """
        if key is None:
            return bool(self._db.run("hold", id=job, fence=fence))
        with self._db.transaction():
            held = bool(self._db.run("hold", id=job, fence=fence))
            if held:
                self.artifacts.begin(job, key, home)
        return held

    def recover(self, node: str, now: int, reason: str) -> list[int]:
        """Send the claims of a dead node back to the queue. Blames no job; harmless when done twice."""
        with self._db.transaction():
            return self.recover_inside(node, now, reason)

    def recover_inside(self, node: str, now: int, reason: str) -> list[int]:
        """`recover` in the transaction that is open."""
        self._count_new()
        rows = self._db.run("orphaned", node=node)
        timeline: list[_EVENT] = []
        counts: Counts = {}
        self._requeue([_lost(row, node, now, reason) for row in rows], node, now, timeline, [], counts)
        self._settle()
        self._timeline(timeline)
        self._keep_errors()
        self._tallies.add(counts, now)
        if rows:
            self._db.ring_all()
        return [row["id"] for row in rows]

    # ---- operators

    def cancel(self, job: int, now: int) -> str:
        """A queued job is cancelled at once; a running one is asked to stop. Returns the status found; Conflict when it has ended."""
        with self._db.transaction():
            self._count_new()
            found = self._cancel(job, now)
            self._settle()
        return found

    def _cancel(self, job: int, now: int) -> str:
        for statement, event in (("cancel_queued", "cancelled"), ("cancel_running", "cancel:requested")):
            for row in self._db.run(statement, id=job, now=now):
                self._timeline([(job, row["seq"], now, event, None)])
                self._db.ring_all()
                if event == "cancelled":
                    self._db.tell_ended([job])
                    before = _SCHEDULED if row["later"] == 1 else _QUEUED
                    self._moved({(row["queue"], before): -1, (row["queue"], event): 1})
                    if row["batch"] is not None:
                        self.flows.ended([row], now)
                    if row["limit_key"] is not None:
                        self._unsettled.add((row["queue"], row["limit_key"]))
                    self._tallies.add({(row["queue"], event): 1}, now)
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
            self._count_new()
            found = self._retry(job, now)
            self._settle()
        return found

    def _retry(self, job: int, now: int) -> str:
        found = self.find(job)
        if found["unique_key"] is not None and found["status"] not in (JobStatus.QUEUED, JobStatus.PROCESSING):
            self._lock_unique([found["unique_key"]])
            for row in self._db.run("unique_holder", key=found["unique_key"], now=now):
                if row["job"] != job:
                    raise Conflict(f"job {job} cannot be retried: job {row['job']} holds its unique key")
            self._db.run("unique_set", key=found["unique_key"], job=job, until=None)
        self._db.run("keep_events", ids=json.dumps([job]))
        for row in self._db.run("retry", id=job):
            self._db.ring({row["queue"]})
            self._timeline([(job, row["seq"], now, "retried", None)])
            self._moved({(row["queue"], found["status"]): -1, (row["queue"], _QUEUED): 1})
            if row["batch"] is not None:
                self.flows.put_back(row["batch"], found["status"])
            if row["limit_key"] is not None:
                self._unsettled.add((row["queue"], row["limit_key"]))
            return str(row["queue"])
        raise Conflict(f"job {job} is {found['status']}; only a done, failed or cancelled job can be retried")

    def await_end(self, job: int, until: int) -> None:
        """Somebody waits for the end of this job until then: whoever ends it shall tell (`Database.tell_ended`)."""
        self._db.run("waiters_old", now=self._db.now())
        self._db.run("waiter_add", job=job, until=until)

    def cancel_many(self, now: int, limit: int, **filters: Any) -> dict[int, str]:
        """Cancel the live jobs that the filters fit; the status found of each. What ends meanwhile is passed over."""
        return self._many(filters.pop("status", None) or "live", limit, filters, lambda job: self._cancel(job, now))

    def retry_many(self, now: int, limit: int, status: str, **filters: Any) -> dict[int, str]:
        """Retry the ended jobs that the filters fit; the queue of each. What cannot be retried is passed over."""
        return self._many(status, limit, filters, lambda job: self._retry(job, now))

    def _many(self, status: str, limit: int, filters: dict[str, Any], verb: Callable[[int], str]) -> dict[int, str]:
        done: dict[int, str] = {}
        ids = self.matching(status, limit, **filters)
        for start in range(0, len(ids), 500):  # short transactions: others write too
            with self._db.transaction():
                self._count_new()
                for job in ids[start : start + 500]:
                    with contextlib.suppress(Conflict, NotFound):
                        done[job] = verb(job)
                self._settle()
        return done


def _state_of(job: NewJob, now: int) -> str:
    return _SCHEDULED if job.run_at is not None and job.run_at > now else _QUEUED


def _state(row: Any) -> str:
    return _SCHEDULED if row["status"] == _QUEUED and row["later"] == 1 else str(row["status"])


def _count(counts: Counts, queue: str, name: str, n: int = 1) -> None:
    key = (queue, name)
    counts[key] = counts.get(key, 0) + n


def _claimed(row: Any, worker: str) -> Claim:
    """The columns stand in the statement in the order in which they are named here."""
    id_, task, queue, args, attempts, attempt, crashes, excused, fence, timeout, backoff, *_ = row
    number = attempt + 1 - excused
    return Claim(id_, fence + 1, worker, task, queue, args, number, attempts, crashes, timeout, backoff)


def _lost(row: Any, node: str, now: int, reason: str) -> Requeue:
    """The end of a claim whose node is no more. When the run stopped, nobody knows."""
    what = {"code": "LOST", "message": f"the run on node {name_of(node)} was lost: {reason}"}
    run = {"attempt": row["attempt"], "worker": row["worker"]}
    failure = {**run, "kind": "lost", **what, "traceback": None, "duration_ms": None}
    data = {**run, "node": name_of(node), "reason": reason}
    back = Requeue(row["id"], row["fence"], "requeued:stale", now, excused=1, error=json.dumps(what))
    return back._replace(data=json.dumps(data), failure=json.dumps(failure))
