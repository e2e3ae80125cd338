"""What the store keeps of runs that failed: with their attempt, in order, bounded, and beyond a retry."""

from __future__ import annotations

import pytest

from ostler.jobs import verdict
from ostler.jobs.verdict import Policy, Ran
from ostler.store import Store
from ostler.store.reading import ERRORS
from ostler.store.rows import Claim, Finish, NewJob, Requeue, Turn
from tests.stores import value

POLICY = Policy()
TRACE = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: bad \N{SNOWMAN}\n'


@pytest.fixture
def job(store: Store) -> int:
    return store.jobs.enqueue([NewJob("t", "q", "{}", attempts=3)], 1000)[0]


def claim(store: Store, now: int = 1_000_000) -> Claim:
    return store.turns.take(Turn("n1@abc", now, wants={"q": ["worker:q:0"]})).claims[0]


def end(store: Store, result: Finish | Requeue) -> None:
    ends = ([result], []) if isinstance(result, Finish) else ([], [result])
    store.turns.take(Turn("n1@abc", 5000, [], *ends))


def raised(run: Claim, message: str = "ValueError: bad") -> Finish | Requeue:
    what = {"code": "ERROR", "message": message, "traceback": TRACE}
    return verdict.transient(Ran(run, 2000, 2500), what, POLICY, after=0)


def test_each_run_that_failed_is_kept_with_its_traceback_also_after_a_retry(store: Store, job: int) -> None:
    for _ in range(3):
        end(store, raised(claim(store)))
    failed = store.jobs.get(job)
    assert (failed["status"], failed["attempt"], failed["error"]["code"]) == ("failed", 3, "RETRIES_EXHAUSTED")
    assert failed["last_error"] == "ValueError: bad (attempt 3 of 3)"
    assert [error["attempt"] for error in failed["errors"]] == [1, 2, 3]
    assert failed["errors"][2] == {
        "attempt": 3,
        "at": 2500,
        "worker": "worker:q:0",
        "node": "n1",
        "kind": "exception",
        "code": "ERROR",
        "message": "ValueError: bad",
        "traceback": TRACE,
        "duration_ms": 500,
    }
    store.jobs.retry(job, 6000)
    again = store.jobs.get(job)
    assert (again["attempt"], again["attempts"], again["last_error"]) == (0, 3, None)
    assert again["errors"] == failed["errors"]
    run = claim(store)
    assert run.attempt == store.jobs.find(job)["attempt"] == 1
    end(store, raised(run, "KeyError: 7\nand more"))
    (listed,), _ = store.jobs.list(status="queued")
    assert (listed["attempt"], listed["last_error"]) == (1, "KeyError: 7")
    assert [error["attempt"] for error in store.jobs.errors(job)] == [1, 2, 3, 1]


def test_a_job_that_is_done_has_written_no_error(store: Store, job: int) -> None:
    run = claim(store)
    end(store, verdict.done(Ran(run, 2000, 2500), "1"))
    assert value(store, "SELECT count(*) FROM job_errors") == 0
    found = store.jobs.get(job)
    assert (found["errors"], found["last_error"]) == ([], None)


def test_a_run_that_did_not_count_has_the_same_attempt_again(store: Store, job: int) -> None:
    end(store, raised(claim(store)))
    for did_not_count in (
        lambda ran: verdict.aborted(ran, "shutdown", "stopped"),
        lambda ran: verdict.snoozed(ran, 0),
        lambda ran: verdict.returned(ran, "x"),
    ):
        run = claim(store)
        assert run.attempt == store.jobs.find(job)["attempt"] == 2
        end(store, did_not_count(Ran(run, 2000, 2500)))
        assert store.jobs.find(job)["attempt"] == 1
    claim(store)
    store.turns.recover("n1@abc", 6000, "its node died")
    lost = store.jobs.errors(job)[-1]
    assert (lost["attempt"], lost["kind"], lost["code"], lost["worker"]) == (2, "lost", "LOST", "worker:q:0")
    assert store.jobs.find(job)["last_error"] == "the run on node n1 was lost: its node died"
    claimed = [e["data"]["attempt"] for e in store.jobs.events(job) if e["name"] == "processing"]
    assert claimed == [1, 2, 2, 2, 2]


def test_a_crash_in_the_last_attempt_is_that_attempt_again(store: Store, job: int) -> None:
    for attempt in (1, 2, 3):
        run = claim(store)
        assert run.attempt == attempt
        end(store, verdict.crashed(Ran(run, 2000, 2500), "signal", "SIGKILL", Policy(crash_limit=9, crash_delay=0)))
    assert claim(store).attempt == 3


def test_the_newest_errors_are_kept_and_older_ones_are_not(store: Store) -> None:
    (job,) = store.jobs.enqueue([NewJob("t", "q", "{}", attempts=1000)], 1000)
    for n in range(ERRORS + 5):
        end(store, raised(claim(store), f"number {n}"))
    assert [error["message"] for error in store.jobs.errors(job)] == [f"number {n}" for n in range(5, ERRORS + 5)]
    assert value(store, "SELECT count(*) FROM job_errors") == ERRORS


def test_the_errors_of_a_deleted_job_go_with_it(store: Store) -> None:
    jobs = store.jobs.enqueue([NewJob("t", "q", "{}", attempts=1) for _ in range(2)], 1000)
    end(store, raised(claim(store)))
    assert store.jobs.retention.purge(done_before=None, failed_before=10_000).jobs == jobs[:1]
    assert value(store, "SELECT count(*) FROM job_errors") == 0


def test_an_error_is_told_once_a_late_end_of_a_lost_claim_is_not(store: Store, job: int) -> None:
    run = claim(store)
    end(store, raised(run))
    end(store, raised(run))
    assert len(store.jobs.errors(job)) == 1


def test_a_cancelled_run_keeps_its_message_beyond_a_retry(store: Store, job: int) -> None:
    end(store, verdict.cancelled(Ran(claim(store), 2000, 2500), "nobody wants it"))
    assert store.jobs.find(job)["last_error"] == "nobody wants it"
    assert store.jobs.events(job)[-1]["data"]["message"] == "nobody wants it"
    store.jobs.retry(job, 6000)
    assert [(e["kind"], e["message"]) for e in store.jobs.errors(job)] == [("cancelled", "nobody wants it")]
