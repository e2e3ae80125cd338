"""What follows from the end of a run: done, another run, or the end of the job. Pure.

A run can return or raise; what the node sees besides is a crash (the process died), a timeout, a cancel, a shutdown.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from ostler.jobs.outcome import CANCELLED
from ostler.store.rows import Claim, Finish, Requeue


@dataclass(frozen=True, slots=True)
class Policy:
    """The numbers that decide about another run."""

    retry_base: float = 1.0
    retry_max: float = 300.0
    crash_limit: int = 2
    jitter: float = 0.0
    crash_delay: float = 10.0


def backoff(run: int, policy: Policy, own: str | None = None, draw: float = 0.0) -> float:
    """Seconds before the run that follows the `run`-th one: doubling, capped, `draw` (-1 to 1) times the jitter off.

    `own` is the task's backoff as JSON, where it has one.
    """
    base, longest = policy.retry_base, policy.retry_max
    if own:
        found = json.loads(own)
        base, longest = found["base"], found["max"]
    return float(min(min(base * 2 ** min(run - 1, 40), longest) * (1 + policy.jitter * draw), longest))


def error(code: str, message: str, **more: Any) -> str:
    """The error of a job as it is stored."""
    return json.dumps({"code": code, "message": message, **{k: v for k, v in more.items() if v is not None}})


LONGEST_WAIT = 10 * 365 * 86400.0


class Ran(NamedTuple):
    """A run of a claim: when it began and ended (ms)."""

    claim: Claim
    began: int
    ended: int

    def finish(self, status: str, event: str, **more: Any) -> Finish:
        return Finish(self.claim.id, self.claim.fence, status, self.began, self.ended, event, **more)

    def requeue(self, event: str, **more: Any) -> Requeue:
        return Requeue(self.claim.id, self.claim.fence, event, self.ended, **more)

    def failure(self, kind: str, what: dict[str, Any]) -> str:
        """How it failed, as the job's errors keep it."""
        run = {"attempt": self.claim.attempt, "worker": self.claim.worker, "kind": kind}
        told = {"code": what["code"], "message": what["message"], "traceback": what.get("traceback")}
        return json.dumps({**run, **told, "duration_ms": max(0, self.ended - self.began)})


def done(ran: Ran, result: str) -> Finish:
    """It returned."""
    claim, began, ended = ran
    return Finish(claim.id, claim.fence, "done", began, ended, "done", result)


def failed(ran: Ran, what: dict[str, Any]) -> Finish:
    """It failed for good; the number of attempts stays."""
    kept = ran.failure("exception", what)
    return ran.finish("failed", "failed", error=json.dumps(what), data=_data(ran, what), failure=kept)


def cancelled(ran: Ran, why: str = CANCELLED) -> Finish:
    """It was cancelled while it ran, or cancelled itself, and has ended."""
    what = {"code": "CANCELLED", "message": why}
    kept = ran.failure("cancelled", what)
    return ran.finish("cancelled", "cancelled", error=json.dumps(what), data=_data(ran, what), failure=kept)


def failure(
    ran: Ran, kind: str, what: dict[str, Any], after: float | None, policy: Policy, draw: float = 0.0
) -> Finish | Requeue:
    """It raised, as `jobs/execute.py` tells it."""
    match kind:
        case "permanent":
            return failed(ran, what)
        case "cancelled":
            return cancelled(ran, what["message"])
        case "snooze":
            return snoozed(ran, after or 0.0)
        case _:
            return transient(ran, what, policy, after, draw=draw)


def transient(
    ran: Ran,
    what: dict[str, Any],
    policy: Policy,
    after: float | None = None,
    *,
    final: str = "RETRIES_EXHAUSTED",
    draw: float = 0.0,
    kind: str = "exception",
) -> Finish | Requeue:
    """It raised: another run while attempts are left, else failed with code `final` and the last error's message."""
    claim, kept = ran.claim, ran.failure(kind, what)
    if claim.attempt >= claim.attempts:
        which = f" (attempt {claim.attempt} of {claim.attempts})" if claim.attempts > 1 else ""
        last = {**what, "code": final, "message": f"{what['message']}{which}", "cause": what["code"]}
        return ran.finish("failed", "failed", error=json.dumps(last), data=_data(ran, last), failure=kept)
    wait = backoff(claim.attempt, policy, claim.backoff, draw) if after is None else min(max(0.0, after), LONGEST_WAIT)
    data = _data(ran, what, after=wait)
    run_at = ran.ended + int(wait * 1000)
    return ran.requeue("requeued:retry", run_at=run_at, error=json.dumps(what), data=data, failure=kept)


def timed_out(ran: Ran, policy: Policy, printed: str | None = None) -> Finish | Requeue:
    """It ran longer than its timeout and was killed: transient, but the last code says TIMEOUT."""
    what = {
        "code": "TIMEOUT",
        "message": f"ran longer than its timeout of {ran.claim.timeout:g} s and was killed with its processes",
        **_printed(printed),
    }
    return transient(ran, what, policy, final="TIMEOUT", kind="timeout")


def crashed(
    ran: Ran, reason: str, detail: str, policy: Policy, printed: str | None = None, *, doubtful: bool = False
) -> Finish | Requeue:
    """Its process died under it: run again at most `crash_limit` times, whatever attempts are left; then it is TOXIC.

    The first time it runs again at once. From the second on it waits `crash_delay` and goes to the end of its queue, so that
    good jobs prove whether it is the job or the environment that crashes. Where nothing finishes (`doubtful`) it is not
    condemned, and goes on waiting for that proof; nor does the run count as an attempt. Neither does a crash in the last
    attempt, which would be numbered above `attempts` when it is run again.
    """
    crashes = ran.claim.crashes + 1
    what = {
        "code": "OOM" if reason == "oom" else "CRASH",
        "message": f"the worker {ran.claim.worker} died while running it: {detail}",
        **_printed(printed),
    }
    kept = ran.failure("crash", what)
    if crashes > policy.crash_limit and not doubtful:
        last = {
            **what,
            "code": "TOXIC",
            "cause": what["code"],
            "message": f"crashed its worker {crashes} times; last: {what['message']}",
        }
        return ran.finish("failed", "failed", crash=1, error=json.dumps(last), data=_data(ran, last), failure=kept)
    later = {"run_at": ran.ended + int(policy.crash_delay * 1000), "last": 1} if crashes > 1 else {}
    data = _data(ran, what, crashes=crashes)
    excused = int(doubtful or ran.claim.attempt >= ran.claim.attempts)
    return ran.requeue(
        "requeued:crash", crash=1, excused=excused, error=json.dumps(what), data=data, failure=kept, **later
    )


def snoozed(ran: Ran, after: float) -> Requeue:
    """It asked to be run later: no attempt is used."""
    wait = min(max(0.0, after), LONGEST_WAIT)
    return ran.requeue("snoozed", run_at=ran.ended + int(wait * 1000), excused=1, data=_data(ran, after=wait))


def aborted(ran: Ran, reason: str, detail: str) -> Requeue:
    """The node or worker was stopped or killed on purpose before it finished: back to the queue, nobody is blamed."""
    event = "aborted:killed" if reason == "killed" else "aborted:shutdown"
    return ran.requeue(event, excused=1, data=_data(ran, reason=f"{ran.claim.worker}: {detail}"))


def returned(ran: Ran, why: str) -> Requeue:
    """Handed over, never begun: back as if nothing had been."""
    return ran.requeue("returned", refund=1, data=json.dumps({"reason": why}))


def _printed(lines: str | None) -> dict[str, str]:
    return {"traceback": lines} if lines else {}


def _data(ran: Ran, what: dict[str, Any] | None = None, **more: Any) -> str:
    found = {"attempt": ran.claim.attempt, "worker": ran.claim.worker, **more}
    if what:
        found |= {"code": what["code"], "message": what["message"][:500]}
    return json.dumps(found)
