"""Unique jobs, limits, rates, chains, batches, schedules, retention: what the store promises, with a fake clock."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from ostler.errors import ConfigError, Conflict, NotFound
from ostler.jobs import schedule
from ostler.store.nodes import NodeRow
from ostler.store import Store
from ostler.store.flows import step_of
from ostler.store.limits import QueueLimit
from ostler.store.rows import Finish, NewJob, Note, Requeue, Turn
from tests.stores import rows, value


def job(**more) -> NewJob:
    return NewJob(more.pop("task", "t"), more.pop("queue", "q"), more.pop("args", "{}"), **more)


def claim(store: Store, count: int = 10, now: int = 1000, **limits: QueueLimit):
    return store.turns.take(Turn("n", now, wants={"q": ["w"] * count}, limits=limits))


def end(store: Store, c, status: str = "done", result: str = "null", now: int = 2000) -> None:
    taken = store.turns.take(Turn("n", now, finishes=[Finish(c.id, c.fence, status, 1, now, status, result=result)]))
    assert taken.lost == []


# ---- unique


def test_a_unique_job_is_stored_once_while_it_is_live(store: Store) -> None:
    first = store.jobs.put([job(unique_key="k")], 1)
    assert store.jobs.put([job(unique_key="k"), job(unique_key="other"), job()], 2) == [
        (first[0][0], False),
        (2, True),
        (3, True),
    ]
    (c, *_) = claim(store).claims
    assert store.jobs.put([job(unique_key="k")], 3)[0] == (c.id, False)
    end(store, c)
    assert store.jobs.put([job(unique_key="k")], 4)[0] == (4, True)


def test_a_unique_job_can_hold_its_key_for_a_period(store: Store) -> None:
    (held,) = store.jobs.enqueue([job(unique_key="k", unique_for=10)], 1000)
    end(store, claim(store).claims[0])
    assert store.jobs.put([job(unique_key="k", unique_for=10)], 10_999) == [(held, False)]
    assert store.jobs.put([job(unique_key="k", unique_for=10)], 11_000) == [(2, True)]


def test_unique_jobs_stay_unique_when_many_enqueue_at_once(store: Store, store_url: str, tmp_path: Path) -> None:
    found: list[int] = []

    def enqueue() -> None:
        with Store.open(store_url, tmp_path, durable=False) as own:
            found.append(own.jobs.enqueue([job(unique_key="k")], 1)[0])

    threads = [threading.Thread(target=enqueue) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(set(found)) == 1


# ---- limits


def test_a_queue_runs_no_more_at_once_than_it_allows(store: Store) -> None:
    store.jobs.enqueue([job() for _ in range(5)], 1)
    limit = QueueLimit(at_once=2)
    first = claim(store, q=limit).claims
    assert len(first) == 2
    assert claim(store, q=limit).claims == []
    end(store, first[0])
    assert len(claim(store, q=limit).claims) == 1


def test_a_key_runs_no_more_at_once_than_it_allows_and_others_pass_it(store: Store) -> None:
    ids = store.jobs.enqueue(
        [job(limit_key="a", limit_max=1) for _ in range(20)]
        + [job(limit_key="b", limit_max=2) for _ in range(3)]
        + [job()],
        1,
    )
    taken = [c.id for c in claim(store, 4).claims]
    assert taken == [ids[0], ids[20], ids[21], ids[23]]
    assert claim(store, 4).claims == []
    store.turns.take(Turn("n", 5, finishes=[Finish(ids[0], 1, "done", 1, 5, "done")]))
    assert [c.id for c in claim(store, 4).claims] == [ids[1]]


def test_a_rate_is_kept_and_says_when_to_come_back(store: Store) -> None:
    store.jobs.enqueue([job() for _ in range(10)], 1)
    limit = QueueLimit(rate=2.0, burst=2.0)
    assert len(claim(store, now=10_000, q=limit).claims) == 2
    taken = claim(store, now=10_000, q=limit)
    assert (taken.claims, taken.next_due) == ([], 10_501)
    assert len(claim(store, now=10_501, q=limit).claims) == 1
    assert len(claim(store, now=60_000, q=limit).claims) == 2  # no more than the burst is saved up


# ---- chains and batches


def test_a_chain_goes_on_with_the_result_and_stops_at_a_failure(store: Store) -> None:
    steps = [step_of(job(task="second", args='{"a": 1}'), "x"), step_of(job(task="third"))]
    (first,) = store.jobs.enqueue([job(next=json.dumps(steps))], 1)
    end(store, claim(store).claims[0], result='{"made": 5}')
    (second,) = claim(store).claims
    assert (second.task, json.loads(second.args)) == ("second", {"a": 1, "x": {"made": 5}})
    end(store, second, status="failed")
    assert claim(store).claims == []
    store.jobs.retry(second.id, 1)
    end(store, claim(store).claims[0])
    assert [c.task for c in claim(store).claims] == ["third"]
    assert first == 1


def test_a_batch_calls_back_once_when_all_have_ended(store: Store) -> None:
    batch, ids = store.jobs.flows.batch([job() for _ in range(3)], step_of(job(task="after"), "summary"), 1)
    claims = claim(store, 3).claims
    end(store, claims[0])
    end(store, claims[1], status="failed")
    assert store.jobs.flows.get_batch(batch)["pending"] == 1
    assert claim(store).claims == []
    end(store, claims[2])
    (callback,) = claim(store).claims
    assert (callback.task, json.loads(callback.args)) == (
        "after",
        {"summary": {"batch": batch, "total": 3, "failed": 1}},
    )
    found = store.jobs.flows.get_batch(batch)
    assert (found["pending"], found["failed"], found["callback_job"]) == (0, 1, callback.id)
    # a retry of one of them does not call back twice
    store.jobs.retry(ids[1], 1)
    assert store.jobs.flows.get_batch(batch)["pending"] == 1
    end(store, claim(store).claims[0])
    assert claim(store).claims == []
    assert store.jobs.flows.get_batch(batch)["failed"] == 0


def test_what_belongs_to_a_job_is_told_from_any_part_of_it(store: Store) -> None:
    following = json.dumps([step_of(job(task="second"), "x"), step_of(job(task="third"))])
    part = job(task="first", next=following)
    batch, [first, alone] = store.jobs.flows.batch([part, job()], step_of(job(task="after"), "summary"), 1)
    claims = {c.id: c for c in claim(store).claims}
    end(store, claims[first])
    second = next(step for step in store.jobs.flows.related(first)["chain"]["steps"] if step["step"] == 1)
    assert (second["task"], second["status"]) == ("second", "queued")
    chain = store.jobs.flows.related(second["job"])["chain"]
    assert (chain["first"], chain["total"], chain["broken"]) == (first, 3, False)
    assert [(s["task"], s["job"], s["status"]) for s in chain["steps"]] == [
        ("first", first, "done"),
        ("second", second["job"], "queued"),
        ("third", None, None),
    ]
    store.jobs.cancel(second["job"], 3)
    assert store.jobs.flows.related(first)["chain"]["broken"]
    end(store, claims[alone], "failed")
    callback = store.jobs.flows.get_batch(batch)["callback_job"]
    found = store.jobs.flows.related(callback)
    assert (found["chain"], found["batch"], found["follows"]["id"]) == (None, None, batch)
    assert store.jobs.flows.related(alone)["batch"]["failed"] == 2
    with pytest.raises(NotFound, match="there is no job 999"):
        store.jobs.flows.related(999)


def test_a_job_in_the_middle_of_a_long_chain_is_shown_with_its_neighbours(store: Store) -> None:
    steps = json.dumps([step_of(job(task=f"t{n}")) for n in range(1, 100)])
    store.jobs.put([job(task="t0", next=steps)], 1)
    for _ in range(50):
        [last] = claim(store, 1).claims
        end(store, last)
    chain = store.jobs.flows.related(last.id)["chain"]
    assert chain["total"] == 100
    assert [step["task"] for step in chain["steps"]] == [f"t{n}" for n in range(39, 60)]


def test_cancelled_jobs_count_for_their_batch_and_an_empty_batch_has_ended(store: Store) -> None:
    batch, ids = store.jobs.flows.batch([job(), job()], step_of(job(task="after")), 1)
    store.jobs.cancel(ids[0], 2)
    (c,) = claim(store).claims
    store.jobs.cancel(c.id, 2)
    from ostler.store.rows import Requeue

    store.turns.take(Turn("n", 3, requeues=[Requeue(c.id, c.fence, "requeued:crash", 3, crash=1)]))
    assert store.jobs.flows.get_batch(batch)["failed"] == 2
    assert [c.task for c in claim(store).claims] == ["after"]
    empty, _ = store.jobs.flows.batch([], step_of(job(task="at once")), 1)
    assert [c.task for c in claim(store).claims] == ["at once"]
    assert store.jobs.flows.get_batch(empty)["finished_at"] is not None


# ---- schedules


MINUTE = 60_000


def declared(store: Store, schedules: list[dict]) -> None:
    if not store.db.run("node", id="n"):
        store.nodes.register(NodeRow("n", "n", 30_000))
    store.nodes.declare("n", [], schedules)


def declare(store: Store, spec: str = "*/5 * * * *", now: int = 0) -> None:
    row = {
        "name": "s",
        "spec": spec,
        "zone": "UTC",
        "step": step_of(job(task="tick")),
        "next_at": schedule.following(spec, "UTC", now),
    }
    declared(store, [row])


def test_a_schedule_fires_at_its_time_once_whoever_asks(store: Store, store_url: str, tmp_path: Path) -> None:
    declare(store)
    assert store.jobs.schedules.fire("n", 5 * MINUTE - 1, schedule.following) == ([], 5 * MINUTE)
    with Store.open(store_url, tmp_path, durable=False) as other:
        fired = [
            store.jobs.schedules.fire("n", 5 * MINUTE, schedule.following),
            other.jobs.schedules.fire("n", 5 * MINUTE, schedule.following),
        ]
    assert [len(jobs) for jobs, _ in fired] == [1, 0]
    assert fired[0][1] == 10 * MINUTE


def test_after_a_long_stop_a_schedule_fires_once_not_a_hundred_times(store: Store) -> None:
    declare(store)
    jobs, due = store.jobs.schedules.fire("n", 1000 * MINUTE + 1, schedule.following)
    assert (len(jobs), due) == (1, 1005 * MINUTE)


def test_declaring_again_keeps_the_next_time_unless_the_schedule_changed(store: Store) -> None:
    declare(store)
    declare(store, now=3 * MINUTE)
    assert store.jobs.schedules.all()[0]["next_at"] == 5 * MINUTE
    declare(store, "0 * * * *")
    assert store.jobs.schedules.all()[0]["next_at"] == 60 * MINUTE
    declared(store, [])
    assert store.jobs.schedules.all() == []


def test_a_paused_schedule_stores_nothing_and_resumes_from_its_next_time(store: Store) -> None:
    declare(store)
    assert store.jobs.schedules.pause("s", MINUTE, schedule.following, paused=True)["paused"] is True
    jobs, due = store.jobs.schedules.fire("n", 8 * MINUTE, schedule.following)
    assert jobs == []
    assert due is not None
    assert due < 9 * MINUTE  # the node looks again soon: somebody may resume it
    declare(store, now=8 * MINUTE)  # its node starts again
    assert store.jobs.schedules.get("s")["paused"] is True
    found = store.jobs.schedules.pause("s", 8 * MINUTE, schedule.following, paused=False)
    assert (found["paused"], found["next_at"]) == (False, 10 * MINUTE)  # what was missed stays missed
    assert [len(store.jobs.schedules.fire("n", n * MINUTE, schedule.following)[0]) for n in (9, 10)] == [0, 1]


def test_a_schedule_that_is_run_now_keeps_its_next_time(store: Store) -> None:
    declare(store)
    store.jobs.schedules.pause("s", MINUTE, schedule.following, paused=True)
    job_, new = store.jobs.schedules.run("s", 2 * MINUTE)
    found = store.jobs.schedules.get("s")
    assert new
    assert (found["last_job"], found["last_at"], found["next_at"]) == (job_, 2 * MINUTE, 5 * MINUTE)
    assert [c.task for c in claim(store).claims] == ["tick"]
    with pytest.raises(NotFound, match="there is no schedule 'x'; known are: s"):
        store.jobs.schedules.run("x", 0)


def test_time_zones_and_daylight_saving() -> None:
    # 2026-03-29, Berlin: 02:30 does not exist; 03:30 local is 01:30 UTC
    before = 1_774_735_200_000  # 2026-03-28 22:00 UTC
    assert schedule.following("30 3 * * *", "Europe/Berlin", before) == 1_774_747_800_000
    winter = schedule.following("0 12 * * *", "America/New_York", 1_767_225_600_000)  # 2026-01-01
    assert winter == 1_767_286_800_000  # 17:00 UTC


@pytest.mark.parametrize(("spec", "zone"), [("* * *", "UTC"), ("61 * * * *", "UTC"), ("* * * * *", "Mars/Base")])
def test_a_wrong_schedule_is_refused(spec: str, zone: str) -> None:
    with pytest.raises(ConfigError):
        schedule.check(spec, zone)


# ---- retention and bulk


def test_old_jobs_are_deleted_with_their_timeline_and_young_or_live_ones_stay(store: Store) -> None:
    ids = store.jobs.enqueue([job() for _ in range(4)], 1000)
    claims = claim(store, 3).claims
    end(store, claims[0], now=2000)
    end(store, claims[1], status="failed", now=2000)
    end(store, claims[2], now=9000)
    assert store.jobs.retention.purge(done_before=5000, failed_before=None).jobs == [ids[0]]
    assert store.jobs.events(ids[0]) == []
    assert store.jobs.retention.purge(done_before=5000, failed_before=5000).jobs == [ids[1]]
    assert [j["id"] for j in store.jobs.list()[0]] == [ids[3], ids[2]]
    assert store.jobs.retention.purge(done_before=None, failed_before=None).jobs == []


def test_filters_find_dead_letters_by_code(store: Store) -> None:
    ids = store.jobs.enqueue([job() for _ in range(3)], 1)
    for c, code in zip(claim(store).claims, ("TOXIC", "VALIDATION", "TOXIC"), strict=True):
        f = Finish(c.id, c.fence, "failed", 1, 2, "failed", error=json.dumps({"code": code, "message": "x"}))
        store.turns.take(Turn("n", 2, finishes=[f]))
    assert store.jobs.matching("failed", 10, code="TOXIC", queue="q") == [ids[0], ids[2]]
    assert [j["id"] for j in store.jobs.list(code="TOXIC")[0]] == [ids[2], ids[0]]


# ---- what a review found


def test_a_key_is_counted_over_all_queues_of_a_turn(store: Store) -> None:
    store.jobs.enqueue([job(queue="a", limit_key="gpu", limit_max=1), job(queue="b", limit_key="gpu", limit_max=1)], 1)
    assert len(store.turns.take(Turn("n", 1, wants={"a": ["w1"], "b": ["w2"]})).claims) == 1


def test_schedules_and_batches_heed_unique_keys(store: Store) -> None:
    row = {"name": "s", "spec": "* * * * *", "zone": "UTC", "step": step_of(job(unique_key="k")), "next_at": MINUTE}
    declared(store, [row])
    fired = [len(store.jobs.schedules.fire("n", n * MINUTE, schedule.following)[0]) for n in (1, 2, 3)]
    assert fired == [1, 0, 0]
    batch, ids = store.jobs.flows.batch([job(unique_key="k"), job(unique_key="new"), job(unique_key="new")], None, 1)
    assert ids == [1, 2, 2]
    assert store.jobs.flows.get_batch(batch)["pending"] == 1


def test_a_chain_that_cannot_begin_is_refused_not_cut_short(store: Store) -> None:
    store.jobs.enqueue([job(unique_key="k")], 1)
    with pytest.raises(Conflict, match="the chain was not stored"):
        store.jobs.enqueue([job(unique_key="k", next=json.dumps([step_of(job())]))], 2)


def test_a_retry_takes_its_unique_key_back_or_is_refused(store: Store) -> None:
    (first,) = store.jobs.enqueue([job(unique_key="k")], 1)
    store.jobs.cancel(first, 2)
    (second,) = store.jobs.enqueue([job(unique_key="k")], 3)
    with pytest.raises(Conflict, match=f"job {second} holds its unique key"):
        store.jobs.retry(first, 4)
    assert store.jobs.retry_many(4, 10, "cancelled", queue="q") == {}
    store.jobs.cancel(second, 5)
    store.jobs.retention.purge(done_before=None, failed_before=None).jobs
    store.jobs.retry(first, 7)
    assert store.jobs.put([job(unique_key="k")], 8) == [(first, False)]


def test_bulk_verbs_pass_over_what_has_ended_meanwhile(store: Store) -> None:
    ids = store.jobs.enqueue([job() for _ in range(3)], 1)
    (c,) = claim(store, 1).claims
    real = store.jobs.matching
    store.jobs.matching = lambda *a, **k: (found := real(*a, **k), end(store, c))[0]  # it ends between look and cancel
    assert store.jobs.cancel_many(5, 100, queue="q") == {ids[1]: "queued", ids[2]: "queued"}


def test_a_clock_that_was_wrong_stops_neither_rates_nor_schedules(store: Store) -> None:
    store.jobs.enqueue([job() for _ in range(30)], 1)
    limit = QueueLimit(rate=10.0, burst=10.0)
    assert len(claim(store, 20, now=10_000_000, q=limit).claims) == 10
    assert len(claim(store, 20, now=1_000_000, q=limit).claims) == 0
    assert len(claim(store, 20, now=1_001_000, q=limit).claims) == 10
    declare(store)
    store.jobs.schedules.fire("n", 100_000 * MINUTE, schedule.following)
    store.jobs.schedules.fire("n", 7 * MINUTE, schedule.following)
    assert store.jobs.schedules.all()[0]["next_at"] == 10 * MINUTE


def test_an_idle_queue_with_a_rate_has_nothing_due(store: Store) -> None:
    assert claim(store, 64, q=QueueLimit(rate=50.0, burst=50.0)).next_due is None


def test_a_job_that_is_retried_during_a_purge_keeps_everything(store: Store) -> None:
    old, _newer = store.jobs.enqueue([job(), job()], 1)
    end(store, claim(store).claims[0], now=10)
    real = store.db.run

    def run(name, /, **values):
        rows = real(name, **values)
        if name == "old_jobs" and rows:
            store.jobs.retry(old, 20)
        return rows

    store.db.run = run
    assert store.jobs.retention.purge(done_before=500, failed_before=None).jobs == []
    assert store.jobs.get(old)["status"] == "queued"
    assert [e["name"] for e in store.jobs.events(old)] == ["created", "processing", "done", "retried"]


def test_notes_of_a_ghost_in_the_same_turn_are_not_written(store: Store) -> None:
    (one,) = store.jobs.enqueue([job()], 1)
    (ghost,) = claim(store).claims
    store.turns.take(Turn("n", 2, requeues=[Requeue(one, ghost.fence, "requeued:crash", 2, crash=1)]))
    (heir,) = claim(store).claims
    for notes in (
        [Note(one, 1, "ghost", 3), Note(one, 2, "good", 3)],
        [Note(one, 2, "good", 3), Note(one, 1, "ghost", 3)],
    ):
        store.turns.take(Turn("n", 3, notes=notes))
    assert heir.fence == 2
    assert [e["name"] for e in store.jobs.events(one)][-2:] == ["good", "good"]
    assert "ghost" not in [e["name"] for e in store.jobs.events(one)]


def test_a_unique_period_outlives_the_job(store: Store) -> None:
    (one,) = store.jobs.enqueue([job(unique_key="k", unique_for=1000)], 0)
    end(store, claim(store).claims[0], now=10)
    store.jobs.retention.purge(done_before=400_000, failed_before=None).jobs
    assert store.jobs.put([job(unique_key="k")], 500_000) == [(one, False)]


def test_a_delay_in_a_chain_counts_from_when_the_step_is_stored(store: Store) -> None:
    store.jobs.enqueue([job(next=json.dumps([step_of(job(task="later"), delay=60)]))], 1)
    end(store, claim(store).claims[0], now=9_000_000)
    assert claim(store, now=9_059_999).claims == []
    assert [c.task for c in claim(store, now=9_060_000).claims] == ["later"]


def test_a_chain_needs_storage_for_its_steps_and_no_more(store: Store) -> None:
    def size(steps: int) -> int:
        before = used()
        store.jobs.enqueue([job(next=json.dumps([step_of(job(args='{"x": 1}')) for _ in range(steps)]))], 1)
        while claims := claim(store).claims:
            end(store, claims[0])
        return used() - before

    def used() -> int:
        tables = {"jobs": "args || coalesce(next, '') || coalesce(result, '')", "steps": "step"}
        return sum(value(store, f"SELECT coalesce(sum(length({text})), 0) FROM {t}") for t, text in tables.items())

    size(5)
    assert size(200) < 6 * size(50)


def test_a_chain_stored_in_its_rows_by_an_older_version_goes_on(store: Store) -> None:
    (first,) = store.jobs.enqueue([job()], 1)
    steps = json.dumps([step_of(job(args="{}"), "x"), step_of(job(task="last", args="{}"), "x")])
    rows(store, "UPDATE jobs SET next = :steps WHERE id = :id", steps=steps, id=first)
    for result in ("1", "2", "3"):
        end(store, claim(store).claims[0], result=result)
    assert claim(store).claims == []
    assert [j["task"] for j in store.jobs.list()[0]] == ["last", "t", "t"]
    assert json.loads(store.db.run("job", id=3)[0]["args"]) == {"x": 2}
    store.jobs.retry(first, 5)  # by hand: the chain runs once more from there
    end(store, claim(store).claims[0], result="7")
    assert json.loads(claim(store).claims[0].args) == {"x": 7}
