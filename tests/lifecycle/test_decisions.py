"""The pure decisions of the lifecycle, with a fake clock."""

from __future__ import annotations

import pytest

from ostler.errors import IllegalTransition
from ostler.lifecycle import ends, recycle, restart
from ostler.lifecycle.child import REASONS
from ostler.lifecycle.process import Ended
from ostler.lifecycle.recycle import RecycleLimits
from ostler.lifecycle.restart import Again, GiveUp, History, Limits
from ostler.lifecycle.state import LEGAL, Status, move
from ostler.lifecycle.worker import Pool, PoolSpec, Slot, Worker
from ostler.store.views import WORKER

LIMITS = Limits()
SECOND = 1000


def crashes(*times: float, limits: Limits = LIMITS, history: History | None = None) -> list[object]:
    history = history or History()
    verdicts = []
    for time in times:
        history, verdict = restart.after_crash(history, int(time * SECOND), limits)
        verdicts.append(verdict)
    return verdicts


def test_the_delay_doubles_from_one_second_to_sixty() -> None:
    hours = [n * 3600 for n in range(8)]
    assert crashes(*hours) == [Again(s) for s in (1, 2, 4, 8, 16, 32, 60, 60)]


def test_five_crashes_within_the_window_fail() -> None:
    verdicts = crashes(0, 70, 140, 210, 280)
    assert verdicts[:4] == [Again(1), Again(2), Again(4), Again(8)]
    assert verdicts[4] == GiveUp("5 crashes within 300 s")


def test_the_window_truly_slides() -> None:
    # never five within 300 s, though each gap is short: the original's "window" failed this
    assert all(isinstance(v, Again) for v in crashes(*[n * 76 for n in range(12)]))
    assert isinstance(crashes(0, 1000, 1075, 1150, 1225, 1299)[-1], GiveUp)
    assert isinstance(crashes(0, 1000, 1075, 1150, 1225, 1300)[-1], Again)


def test_twenty_crashes_in_a_lifetime_fail_however_slow() -> None:
    verdicts = crashes(*[n * 1800 for n in range(20)])
    assert all(isinstance(v, Again) for v in verdicts[:19])
    assert verdicts[19] == GiveUp("20 crashes in its lifetime")


def test_health_ends_the_row_but_not_the_counts() -> None:
    history = History()
    for time in (0, 10, 20):
        history, _ = restart.after_crash(history, time * SECOND, LIMITS)
    history = restart.after_healthy(history)
    assert (history.streak, history.lifetime, len(history.crashes)) == (0, 3, 3)
    history, verdict = restart.after_crash(history, 30 * SECOND, LIMITS)
    assert verdict == Again(1)


def test_a_crash_that_does_not_count_delays_the_restart_by_one_second_however_many_there_were() -> None:
    assert restart.after_uncounted_crash(LIMITS) == Again(1)
    assert restart.after_uncounted_crash(Limits(backoff_max=0.1)) == Again(0.1)


def test_clean_exits_are_free_up_to_the_limit_then_a_loop() -> None:
    history = History()
    for n in range(5):
        assert not restart.is_exit_loop(history, n * SECOND, LIMITS)
        history = restart.after_clean_exit(history, n * SECOND, LIMITS)
    assert restart.is_exit_loop(history, 5 * SECOND, LIMITS)
    assert not restart.is_exit_loop(history, 301 * SECOND, LIMITS)
    assert (history.streak, history.lifetime) == (0, 0)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (RecycleLimits(), None),
        (RecycleLimits(count=10), "served 10 of 10"),
        (RecycleLimits(count=11), None),
        (RecycleLimits(age=60.0), "is 60 s old, limit 60 s"),
        (RecycleLimits(age=61.0), None),
        (RecycleLimits(rss_mb=500.0), "uses 512 MB, limit 500 MB"),
        (RecycleLimits(rss_mb=600.0), None),
    ],
)
def test_recycling_is_due_by_count_age_or_memory(limits: RecycleLimits, reason: str | None) -> None:
    assert recycle.due(limits, served=10, age=60.0, rss_mb=512.0) == reason


def test_unknown_memory_recycles_nothing() -> None:
    assert recycle.due(RecycleLimits(rss_mb=1.0), served=0, age=0.0, rss_mb=None) is None


def test_only_the_drawn_edges_are_legal() -> None:
    drawn = {
        ("stopped", "starting"), ("starting", "healthy"), ("starting", "stopping"), ("starting", "crashed"), ("starting", "stopped"),
        ("healthy", "draining"), ("healthy", "crashed"), ("healthy", "stopped"), ("draining", "stopping"), ("draining", "crashed"),
        ("draining", "stopped"), ("stopping", "stopped"), ("stopping", "crashed"), ("crashed", "starting"), ("crashed", "failed"),
        ("crashed", "stopped"), ("failed", "stopped"),
    }  # fmt: skip
    assert {(a, b) for a in Status for b in LEGAL[a]} == drawn
    for a in Status:
        for b in Status:
            if (a, b) in drawn:
                assert move("w", a, b) is b
            else:
                with pytest.raises(IllegalTransition, match=f"w cannot go from {a} to {b}"):
                    move("w", a, b)


def judged(
    code: int, *, status: Status = Status.HEALTHY, killing: str | None = None, oom: bool = False, clean: int = 0
) -> tuple[str, str, int]:
    worker = Worker(
        Slot("worker:q:0", 0, Pool(PoolSpec("q", 1, ["x"]))),
        1,
        0.0,
        status=status,
        killing=killing,
        on_purpose=killing in ("job-timeout", "cancelled", "killed"),
    )
    history = History(clean=tuple(range(clean)))
    end = ends.judge(worker, Ended(code, 0.0, None), history, 5, LIMITS, memory_ran_out=oom)
    return end.reason, end.kind, ends.recorded_code(end)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"code": 1}, ("exit", "crash", 1)),
        ({"code": 70}, ("app-load", "crash", 70)),
        ({"code": -11}, ("signal", "crash", -11)),
        ({"code": -9}, ("signal", "crash", -9)),
        ({"code": -9, "oom": True}, ("oom", "crash", -9)),
        ({"code": -15, "oom": True}, ("signal", "crash", -15)),
        ({"code": 0}, ("exit", "clean", 0)),
        ({"code": 0, "clean": 5}, ("exit-loop", "crash", 0)),
        ({"code": 0, "status": Status.STOPPING}, ("stopped", "asked", 0)),
        ({"code": -15, "status": Status.STOPPING}, ("stopped", "asked", -15)),
        ({"code": -9, "killing": "silence"}, ("silence", "crash", -2)),
        ({"code": -9, "killing": "protocol"}, ("protocol", "crash", -3)),
        ({"code": 127, "killing": "spawn"}, ("spawn", "crash", -1)),
        ({"code": -9, "killing": "startup-deadline", "status": Status.STARTING}, ("startup-deadline", "crash", -9)),
        ({"code": -9, "killing": "job-timeout"}, ("job-timeout", "asked", -9)),
        ({"code": -9, "killing": "cancelled"}, ("cancelled", "asked", -9)),
        ({"code": -9, "killing": "killed"}, ("killed", "asked", -9)),
    ],
)
def test_every_end_has_a_reason_a_kind_and_a_code(given: dict, expected: tuple[str, str, int]) -> None:
    assert judged(**given) == expected


@pytest.mark.parametrize(
    ("reason", "code", "signal", "short", "long"),
    [
        ("signal", -9, "SIGKILL", "killed by SIGKILL", "was killed by SIGKILL"),
        ("signal", -11, "SIGSEGV", "killed by SIGSEGV (fault in native code)", "was killed by SIGSEGV (fault in native code)"),
        ("exit", 3, None, "exit code 3", "exited with code 3"),
        ("silence", -9, "SIGKILL", "missed heartbeats", "missed its heartbeats and was killed"),
        ("killed", -9, "SIGKILL", "killed by an operator", "was killed by an operator"),
        ("stopped", 0, None, "stopped as asked", "stopped as asked"),
        ("something-new", 1, None, "something new", "ended: something new"),
    ],
)  # fmt: skip
def test_an_end_in_words(reason: str, code: int, signal: str | None, short: str, long: str) -> None:
    assert ends.words(reason, code, signal) == short
    assert ends.words(reason, code, signal, long=True) == long


def test_a_model_that_no_call_needs_is_told_as_idle() -> None:
    row = {**dict.fromkeys(WORKER), "status": "stopped", "exit_reason": "stopped", "exit_code": 0}
    assert ends.shown({**row, "key": None})["exit_text"] == "stopped as asked"
    assert ends.shown({**row, "key": '["small", 0]'})["exit_text"] == "idle; the next call starts it"


def test_memory_is_named_only_when_the_kernel_counted_a_kill_for_it() -> None:
    assert "memory" not in ends.words("signal", -9, "SIGKILL", long=True)
    assert "probably out of memory" in ends.words("oom", -9, "SIGKILL")


def test_every_reason_of_an_end_has_words() -> None:
    known = {
        *ends._SEED_CODE,
        *REASONS.values(),
        "job-timeout",
        "cancelled",
        "shutdown",
        "oom",
        "killed",
        "startup-deadline",
        "exit-loop",
    }
    assert known <= ends._WORDS.keys()


def test_what_a_worker_printed_last_explains_its_own_exit_and_no_kill() -> None:
    said = ["resizing 77", ""]
    assert ends.last_words(said, "exit") == "resizing 77"
    assert ends.last_words(said, "signal") is None
    assert ends.last_words(said, "killed") is None
    stack = [
        *said,
        "Fatal Python error: Segmentation fault",
        "",
        "Current thread (most recent call first):",
        "  File x",
    ]
    assert ends.last_words(stack, "signal") == "File x"
    assert ends.last_words([], "exit") is None
