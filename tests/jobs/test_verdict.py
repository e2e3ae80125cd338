"""Every way that a run can end, decided without processes."""

from __future__ import annotations

import json

import pytest

from ostler.jobs import verdict
from ostler.jobs.verdict import Policy, Ran
from ostler.store.rows import Claim, Finish, Requeue

POLICY = Policy(retry_base=1.0, retry_max=10.0, crash_limit=2)
WHAT = {"code": "ERROR", "message": "boom"}


def ran(*, attempt: int = 1, attempts: int = 3, crashes: int = 0) -> Ran:
    return Ran(Claim(7, 4, "worker:q:0", "t", "q", "{}", attempt, attempts, crashes, 5.0), 1000, 2000)


@pytest.mark.parametrize(("attempt", "wait"), [(1, 1000), (2, 2000)])
def test_transient_failures_are_retried_with_doubling_delay(attempt: int, wait: int) -> None:
    found = verdict.transient(ran(attempt=attempt), WHAT, POLICY)
    assert isinstance(found, Requeue)
    assert (found.id, found.fence, found.run_at, found.crash, found.excused, found.refund) == (
        7,
        4,
        2000 + wait,
        0,
        0,
        0,
    )


def test_the_delay_is_capped() -> None:
    assert [verdict.backoff(n, POLICY) for n in (1, 2, 3, 4, 5, 60)] == [1, 2, 4, 8, 10, 10]


def test_the_last_attempt_exhausts() -> None:
    found = verdict.transient(ran(attempt=3), WHAT, POLICY)
    assert isinstance(found, Finish)
    assert json.loads(found.error)["code"] == "RETRIES_EXHAUSTED"
    assert json.loads(found.error)["cause"] == "ERROR"


@pytest.mark.parametrize(
    ("end", "kind", "code"),
    [
        (lambda run: verdict.transient(run, WHAT, POLICY), "exception", "ERROR"),
        (lambda run: verdict.failed(run, {"code": "VALIDATION", "message": "no"}), "exception", "VALIDATION"),
        (lambda run: verdict.timed_out(run, POLICY), "timeout", "TIMEOUT"),
        (lambda run: verdict.crashed(run, "oom", "SIGKILL", POLICY), "crash", "OOM"),
        (lambda run: verdict.cancelled(run, "no"), "cancelled", "CANCELLED"),
    ],
)
@pytest.mark.parametrize("attempt", [2, 3])
def test_a_run_that_failed_tells_its_own_error_also_in_the_last_attempt(end, kind, code, attempt) -> None:
    kept = json.loads(end(ran(attempt=attempt)).failure)
    assert (kept["attempt"], kept["worker"], kept["kind"], kept["code"]) == (attempt, "worker:q:0", kind, code)
    assert "attempt" not in kept["message"] and kept["duration_ms"] == 1000


def test_a_run_that_did_not_fail_tells_no_error() -> None:
    ends = (
        verdict.done(ran(), "1"),
        verdict.snoozed(ran(), 5),
        verdict.aborted(ran(), "shutdown", "why"),
        verdict.returned(ran(), "x"),
    )
    assert [end.failure for end in ends] == [None] * 4


@pytest.mark.parametrize(("attempt", "doubtful", "excused"), [(1, False, 0), (1, True, 1), (3, False, 1)])
def test_a_crash_never_takes_the_attempt_above_what_is_allowed(attempt: int, doubtful: bool, excused: int) -> None:
    found = verdict.crashed(ran(attempt=attempt), "signal", "SIGKILL", POLICY, doubtful=doubtful)
    assert isinstance(found, Requeue) and found.excused == excused


def test_a_crash_is_run_again_twice_whatever_attempts_say_then_toxic() -> None:
    for crashes in (0, 1):
        found = verdict.crashed(ran(attempt=crashes + 1, attempts=1, crashes=crashes), "signal", "SIGKILL", POLICY)
        assert isinstance(found, Requeue)
        assert (found.crash, found.event) == (1, "requeued:crash")
    found = verdict.crashed(ran(attempt=3, attempts=1, crashes=2), "signal", "SIGKILL", POLICY)
    assert isinstance(found, Finish)
    assert (found.crash, json.loads(found.error)["code"]) == (1, "TOXIC")


def test_a_timeout_is_transient_and_says_timeout_at_the_end() -> None:
    assert isinstance(verdict.timed_out(ran(), POLICY), Requeue)
    found = verdict.timed_out(ran(attempt=3), POLICY)
    assert json.loads(found.error)["code"] == "TIMEOUT"


def test_what_never_began_gets_its_attempt_back_and_a_shutdown_blames_nobody() -> None:
    back = verdict.returned(ran(), "x")
    assert (back.refund, back.crash, back.excused, back.event) == (1, 0, 0, "returned")
    for reason, event in (("shutdown", "aborted:shutdown"), ("killed", "aborted:killed")):
        aborted = verdict.aborted(ran(), reason, "why")
        assert (aborted.refund, aborted.crash, aborted.excused, aborted.event) == (0, 0, 1, event)


def test_a_permanent_failure_is_final() -> None:
    found = verdict.failed(ran(), {"code": "VALIDATION", "message": "no"})
    assert (found.status, json.loads(found.error)["code"]) == ("failed", "VALIDATION")
