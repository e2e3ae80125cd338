"""The dispatcher's turns: one transaction that writes what happened to running jobs and claims the next ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from ostler.store import limits
from ostler.store.artifacts import Artifacts
from ostler.store.brief import Brief
from ostler.store.changes import PROCESSING, QUEUED, SCHEDULED, Changes, Event, state
from ostler.store.database import Database
from ostler.store.flows import Flows
from ostler.store.frontier import Frontier
from ostler.store.identity import LIVE, lost_node, name_of
from ostler.store.live import Counts, bin_of
from ostler.store.rows import Claim, Finish, JobStatus, Note, Requeue, Taken, Turn

_REQUEUED = {"requeued:retry": "retried", "requeued:crash": "crashed"}  # events that are counted
_BUSY = 5  # milliseconds after which a queue is looked at again whose limits another node was counting


class Turns:
    """Turns of one connection."""

    def __init__(self, db: Database, changes: Changes, flows: Flows, artifacts: Artifacts) -> None:
        self._db, self._changes, self._flows, self._artifacts = db, changes, flows, artifacts
        self._frontier = Frontier(whole=not db.shared)
        self._brief = Brief(db, self._frontier)
        # A node, and the queues for which it has idle workers, as its row says.
        self._waits: tuple[str, list[str]] = ("", [])

    def take(self, turn: Turn) -> Taken:
        """Write what happened and claim for the free workers, in one transaction.

        A note, finish or requeue whose (id, fence) is no longer the current claim changes nothing and is named in `lost` (a note is just dropped).
        No job is claimed twice: the claim finds it queued and holds its row, or it does not get it. Raises NodeLost when the node was
        declared dead; then nothing was written.
        """
        if self._brief.fits(turn) and (claimed := self._brief.take(turn)) is not None:
            waits = _waits_after(turn, claimed.claims)
            dues = [claimed.due, *(self._read_again(queue, turn.now) for queue in waits)]
            again = self._waits_are(turn.node, waits) or claimed.more
            return Taken(claimed.claims, [], _first(dues), again=again)
        try:
            return self._turn(turn)
        finally:
            self._changes.forget()

    def _turn(self, turn: Turn) -> Taken:
        lost: list[int] = []
        timeline: list[Event] = []
        counts: Counts = {}
        with self._db.transaction():
            begun = self._begin(turn) if turn.number else self._db.run("next_due")
            if not begun:
                self._waits = ("", [])  # as that turn wrote it
                return Taken(self._claims_of(turn.node), [], turn.now, replayed=True)
            due = begun[0]["due"]
            self._changes.gather()
            self._changes.count_new()
            self._note(turn.notes, timeline)
            self._finish(turn, timeline, lost, counts)
            self._requeue(turn.requeues, turn.node, turn.now, timeline, lost, counts)
            if turn.finishes or turn.requeues:  # which may have scheduled another
                due = self._db.run("next_due")[0]["due"]
            if turn.wants and due is not None and due <= turn.now:
                self._promote(turn.now)
                due = self._db.run("next_due")[0]["due"]
            self._changes.settle()  # before the claims: those take locks without waiting
            claims, dues, missed = self._claim(turn, counts) if turn.wants else ([], [], 0)
            self._changes.settle()
            self._changes.timeline(timeline)
            self._changes.keep_errors()
            self._changes.tally(counts, turn.now)
            dues.append(due)
            self._brief.next_due(due)
            self._changes.moved_all()
            waits = _waits_after(turn, claims) if turn.number and self._db.shared else None
            if waits is not None and waits != self._waits_of(turn.node):
                self._db.tell("node_waits", id=turn.node, waits=json.dumps(waits))
        again = waits is not None and self._waits_are(turn.node, waits)
        return Taken(claims, lost, _first(dues), missed, again=again)

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

    def _waits_are(self, node: str, waits: list[str]) -> bool:
        """The node's row says this now. Where a queue is new among them, look once more: a job that was stored meanwhile rang for nobody."""
        again = not set(waits) <= set(self._waits_of(node))
        self._waits = (node, waits)
        return again

    def _waits_of(self, node: str) -> list[str]:
        return self._waits[1] if self._waits[0] == node else []

    def _note(self, notes: list[Note], timeline: list[Event]) -> None:
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
                self._artifacts.add(published)

    def _finish(self, turn: Turn, timeline: list[Event], lost: list[int], counts: Counts) -> None:
        finishes = turn.finishes
        if not finishes:
            return
        by_id = {f.id: f for f in finishes}
        followed = []
        ended: list[tuple[str, str]] = []
        awaited: list[int] = []
        runs: dict[str, list[int]] = {}  # queue -> how long each run that is done took
        for row in self._ended(finishes):
            id_, seq, queue, status, of_batch, following, chain, _, _, is_awaited = row  # in the statement's order
            done = by_id.pop(id_)
            ended.append((queue, status))
            if is_awaited:
                awaited.append(id_)
            if status != JobStatus.DONE:  # that the row tells by itself
                timeline.append((id_, seq, done.finished_at, done.event, done.data))
                self._changes.failed(done, seq, done.finished_at, turn.node)
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
            moved[queue, PROCESSING] -= n
        self._changes.moved(moved)
        if followed:
            self._flows.ended(followed, turn.now)

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
        self, requeues: list[Requeue], node: str, now: int, timeline: list[Event], lost: list[int], counts: Counts
    ) -> None:
        if not requeues:
            return
        by_id = {r.id: r for r in requeues}
        batch = [[r.id, r.fence, r.run_at, r.refund, r.crash, r.excused, r.error, r.last] for r in requeues]
        moved: Counter[tuple[str, str]] = Counter()
        self._db.run("keep_events", ids=json.dumps([*by_id]))
        for row in self._db.run("requeue", batch=json.dumps(batch), now=now):
            back = by_id.pop(row["id"])
            moved[row["queue"], PROCESSING] -= 1
            moved[row["queue"], state(row)] += 1
            event = back.event
            if name := _REQUEUED.get(event):
                _count(counts, row["queue"], name)
            if row["status"] == JobStatus.CANCELLED:
                event = "cancelled"
                _count(counts, row["queue"], event)
                self._db.tell_ended([back.id])
                if row["batch"] is not None:
                    self._flows.ended([row], now)
            timeline.append((back.id, row["seq"], back.at, event, back.data))
            self._changes.failed(back, row["seq"], back.at, node)
            self._changes.limited([(row["queue"], row["limit_key"])])
        lost.extend(by_id)
        self._changes.moved(moved)
        for queue in {queue for queue, _ in moved}:
            self._frontier.forget(queue)
        self._db.ring({queue for queue, _ in moved}, others=True)

    def _promote(self, now: int) -> None:
        """Scheduled jobs whose time has come wait in their queue."""
        promoted = self._db.run("promote", now=now)
        self._changes.limited((row["queue"], row["limit_key"]) for row in promoted)
        for queue, n in Counter(row["queue"] for row in promoted).items():
            self._frontier.forget(queue)
            self._changes.moved({(queue, SCHEDULED): -n, (queue, QUEUED): n})

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
            if len(rows) < len(workers):
                dues.append(self._read_again(queue, turn.now))
            waited = []  # how long, for their first run
            for row, worker in zip(rows, workers, strict=False):
                claim, attempt, since = _claimed(row, worker)
                claims.append(claim)
                if attempt == 0:
                    waited.append(turn.now - since)
            for ms, n in Counter(waited).items():
                _count(counts, queue, f"wait:{bin_of(ms)}", n)
        self._brief.met_keys(keys.met, turn.now)
        if keys.passed_over:
            dues.append(turn.now + _BUSY)
        if not claims:
            return claims, dues, 0
        batch = json.dumps({c.id: c.worker for c in claims})
        rows = self._db.run("claim", batch=batch, node=turn.node, now=turn.now)
        self._changes.limited(keys.picked)
        taken = claims
        if self._db.shared:  # else nobody can have taken one since it was picked
            held = {row[0] for row in rows}
            taken = [c for c in claims if c.id in held]
        for queue, n in Counter([c.queue for c in taken]).items():
            self._changes.moved({(queue, QUEUED): -n, (queue, PROCESSING): n})
        return taken, dues, len(claims) - len(taken)

    def _read_again(self, queue: str, now: int) -> int | None:
        """When the queue is read from the beginning again; None when it is anyway."""
        wait = self._frontier.wait(queue)
        return None if wait is None else now + int(wait * 1000) + 1

    def recover(self, node: str, now: int, reason: str) -> list[int]:
        """Send the claims of a dead node back to the queue. Blames no job; harmless when done twice."""
        with self._db.transaction():
            return self.recover_inside(node, now, reason)

    def recover_inside(self, node: str, now: int, reason: str) -> list[int]:
        """`recover` in the transaction that is open."""
        self._changes.count_new()
        rows = self._db.run("orphaned", node=node)
        timeline: list[Event] = []
        counts: Counts = {}
        self._requeue([_lost(row, node, now, reason) for row in rows], node, now, timeline, [], counts)
        self._changes.settle()
        self._changes.timeline(timeline)
        self._changes.keep_errors()
        self._changes.tally(counts, now)
        if rows:
            self._db.ring_all()
        return [row["id"] for row in rows]


def _waits_after(turn: Turn, claims: list[Claim]) -> list[str]:
    """The queues for which workers are idle now: who stores a job wakes only those who wait for it."""
    got = Counter(claim.queue for claim in claims)
    return sorted(queue for queue, workers in turn.wants.items() if got[queue] < len(workers))


def _first(dues: Iterable[int | None]) -> int | None:
    return min((due for due in dues if due is not None), default=None)


def _count(counts: Counts, queue: str, name: str, n: int = 1) -> None:
    key = (queue, name)
    counts[key] = counts.get(key, 0) + n


def _claimed(row: Any, worker: str) -> tuple[Claim, int, int]:
    """The claim, the runs before it, and since when the job waits. The columns stand in the statement in the order in which they are named here."""
    id_, task, queue, args, attempts, attempt, crashes, excused, fence, timeout, backoff, _, _, _, _, since = row
    number = attempt + 1 - excused
    claim = Claim(id_, fence + 1, worker, task, queue, args, number, attempts, crashes, timeout, backoff)
    return claim, attempt, since


def _lost(row: Any, node: str, now: int, reason: str) -> Requeue:
    """The end of a claim whose node is no more. When the run stopped, nobody knows."""
    what = {"code": "LOST", "message": f"the run on node {name_of(node)} was lost: {reason}"}
    run = {"attempt": row["attempt"], "worker": row["worker"]}
    failure = {**run, "kind": "lost", **what, "traceback": None, "duration_ms": None}
    data = {**run, "node": name_of(node), "reason": reason}
    back = Requeue(row["id"], row["fence"], "requeued:stale", now, excused=1, error=json.dumps(what))
    return back._replace(data=json.dumps(data), failure=json.dumps(failure))
