"""What the store promises about jobs."""

from __future__ import annotations

import json
import os
import multiprocessing
import re
import sqlite3
import threading
from pathlib import Path

import pytest

from ostler.errors import ConfigError, Conflict, NotFound, StoreBusy
from ostler.store import Store, now_ms, queries
from ostler.store.rows import Finish, NewJob, Note, Requeue, Turn
from tests.stores import locked, no_events, rows, value


def put(store: Store, count: int = 1, **more) -> list[int]:
    now, queue, args = more.pop("now", 1000), more.pop("queue", "q"), more.pop("args", "{}")
    return store.jobs.enqueue([NewJob("t", queue, args, **more) for _ in range(count)], now)


def claim(store: Store, count: int = 1, queue: str = "q", node: str = "n", now: int = 2000):
    return store.turns.take(Turn(node, now, wants={queue: ["worker:q:0"] * count})).claims


def done(c, **more) -> Finish:
    return Finish(c.id, c.fence, "done", 2000, 3000, "done", result="1", **more)


def names(store: Store, job: int) -> list[str]:
    return [e["name"] for e in store.jobs.events(job)]


def test_a_claim_is_fenced_and_counted_once(store: Store) -> None:
    (job,) = put(store)
    (c,) = claim(store)
    assert (c.id, c.attempt, c.fence, c.worker) == (job, 1, 1, "worker:q:0")
    assert claim(store) == []
    row = store.jobs.get(job)
    assert (row["status"], row["attempt"], row["node"], row["worker"]) == ("processing", 1, "n", "worker:q:0")


def test_a_late_result_of_a_lost_claim_is_dropped(store: Store) -> None:
    (job,) = put(store)
    (ghost,) = claim(store)
    store.turns.take(Turn("n", 2500, requeues=[Requeue(ghost.id, ghost.fence, "requeued:crash", 2500, crash=1)]))
    taken = store.turns.take(Turn("n", 2600, finishes=[done(ghost)]))
    assert taken.lost == [job]
    assert store.jobs.get(job)["status"] == "queued"
    (heir,) = claim(store)
    assert heir.fence == ghost.fence + 1
    late = store.turns.take(
        Turn("n", 2700, finishes=[done(ghost)], notes=[Note(job, ghost.fence, "x", 1)], requeues=[])
    )
    assert late.lost == [job]
    assert store.jobs.get(job)["status"] == "processing"
    assert store.turns.take(Turn("n", 2800, finishes=[done(heir)])).lost == []
    again = store.turns.take(Turn("n", 2900, finishes=[done(heir)]))  # the same result twice
    assert again.lost == [job]
    assert names(store, job) == ["created", "processing", "requeued:crash", "processing", "done"]


def test_a_returned_job_has_its_attempt_back_but_never_its_fence(store: Store) -> None:
    (job,) = put(store)
    (first,) = claim(store)
    store.turns.take(Turn("n", 2500, requeues=[Requeue(job, first.fence, "returned", 2500, refund=1)]))
    (second,) = claim(store)
    assert (second.attempt, second.fence) == (1, 2)
    assert store.turns.take(Turn("n", 2600, finishes=[done(first)])).lost == [job]


def test_state_and_timeline_are_one_transaction(store: Store) -> None:
    (job,) = put(store)
    (c,) = claim(store)
    note = Note(job, c.fence, "said", 2600)
    with no_events(store), pytest.raises(Exception, match="no room"):
        store.turns.take(Turn("n", 2600, notes=[note], finishes=[done(c)]))
    assert store.jobs.get(job)["status"] == "processing"
    assert store.turns.take(Turn("n", 2600, finishes=[done(c)])).lost == []


def stored_events(store: Store) -> int:
    return int(value(store, "SELECT count(*) FROM job_events"))


def test_a_plain_job_stores_no_events_and_its_row_tells_all_of_them(store: Store) -> None:
    (job,) = put(store)
    (c,) = claim(store)
    assert store.jobs.events(job)[1:] == [
        {"seq": 2, "at": 2000, "name": "processing", "data": {"attempt": 1, "worker": "worker:q:0", "node": "n"}}
    ]
    store.turns.take(Turn("n", 3100, finishes=[done(c)]))
    assert [(e["seq"], e["at"], e["name"]) for e in store.jobs.events(job)] == [
        (1, 1000, "created"),
        (2, 2000, "processing"),
        (3, 3000, "done"),
    ]
    assert stored_events(store) == 0


def test_a_row_that_forgets_an_event_has_stored_it_before(store: Store) -> None:
    (job,) = put(store)
    (first,) = claim(store, now=2000)
    back = Requeue(job, first.fence, "returned", 2500, refund=1)
    store.turns.take(Turn("n", 2500, notes=[Note(job, first.fence, "said", 2400)], requeues=[back]))
    (second,) = claim(store, now=3000)
    store.turns.take(Turn("n", 4000, finishes=[done(second)]))
    store.jobs.retry(job, 5000)
    (third,) = claim(store, now=6000)
    failed = Finish(job, third.fence, "failed", 6000, 6500, "failed", error='{"code": "E"}')
    store.turns.take(Turn("n", 7000, finishes=[failed]))
    store.jobs.retry(job, 8000)
    store.jobs.cancel(job, 9000)
    expected = [
        (1, 1000, "created"),
        (2, 2000, "processing"),
        (3, 2400, "said"),
        (4, 2500, "returned"),
        (5, 3000, "processing"),
        (6, 3000, "done"),
        (7, 5000, "retried"),
        (8, 6000, "processing"),
        (9, 6500, "failed"),
        (10, 8000, "retried"),
        (11, 9000, "cancelled"),
    ]
    found = store.jobs.events(job)
    assert [(e["seq"], e["at"], e["name"]) for e in found] == expected
    assert [e["data"]["attempt"] for e in found if e["name"] == "processing"] == [1, 1, 1]
    for limit in (1, 2, 3):
        paged, after = [], 0
        while after is not None:
            page, after = store.jobs.event_page(job, after, limit)
            assert len(page) <= limit
            paged += page
        assert paged == found
        assert store.jobs.newest_events(job, limit) == found[-limit:]


def test_an_event_that_is_stored_beside_its_row_counts_once(store: Store) -> None:
    (job,) = put(store)
    (c,) = claim(store)
    store.turns.take(Turn("n", 3100, finishes=[done(c)]))
    told = store.jobs.events(job)
    rows(store, "INSERT INTO job_events (job, seq, at, name, data) SELECT job, seq, at, name, data FROM timeline")
    assert stored_events(store) == 3
    assert store.jobs.events(job) == told
    store.jobs.retry(job, 5000)
    assert names(store, job) == ["created", "processing", "done", "retried"]


def test_no_id_is_given_twice_also_after_the_newest_job_is_old(store: Store) -> None:
    first, second = put(store, 2)
    for c in claim(store, 2):
        store.turns.take(Turn("n", 3100, finishes=[done(c)]))
    assert store.jobs.retention.purge(done_before=9000, failed_before=9000) == ([first], False)
    assert put(store) == [second + 1]
    assert store.jobs.retention.purge(done_before=9000, failed_before=9000) == ([second], False)
    rows(store, "DELETE FROM jobs")  # whoever deletes it
    assert put(store) == [second + 2]


def test_a_hold_is_a_write_and_only_the_current_claim_gets_one(store: Store) -> None:
    (job,) = put(store)
    (c,) = claim(store)
    before = value(store, "SELECT held FROM jobs")
    assert store.jobs.hold(job, c.fence)
    assert value(store, "SELECT held FROM jobs") == before + 1
    assert not store.jobs.hold(job, c.fence + 1)
    store.jobs.cancel(job, 2500)
    assert not store.jobs.hold(job, c.fence)


def test_notes_number_the_timeline_in_order_and_keep_the_last_progress(store: Store) -> None:
    (job,) = put(store)
    (c,) = claim(store)
    notes = [
        Note(job, c.fence, "source:ready", 10),
        Note(job, c.fence, "progress", 11, 10.0, "a"),
        Note(job, c.fence, "progress", 12, 20.0),
    ]
    store.turns.take(Turn("n", 2600, notes=notes, finishes=[done(c)]))
    row = store.jobs.get(job)
    assert [(e["seq"], e["name"]) for e in row["events"]] == [
        (1, "created"), (2, "processing"), (3, "source:ready"), (4, "progress"), (5, "progress"), (6, "done"),
    ]  # fmt: skip
    assert (row["progress"], row["stage"]) == (100.0, "a")  # it is done


def test_priority_then_age_decides_the_order(store: Store) -> None:
    ids = [put(store, priority=p)[0] for p in (0, 5, -1, 5, 0)]
    assert [c.id for c in claim(store, 5)] == [ids[1], ids[3], ids[0], ids[4], ids[2]]


def test_a_job_requeued_last_goes_behind_what_is_queued_and_ahead_of_what_comes_later(store: Store) -> None:
    first, second, third = put(store, 3)
    (c,) = claim(store)
    store.turns.take(Turn("n", 2500, requeues=[Requeue(first, c.fence, "requeued:crash", 2500, crash=1, last=1)]))
    (later,) = put(store)
    assert [c.id for c in claim(store, 4)] == [second, third, first, later]


def test_a_retry_by_hand_gives_a_job_its_old_place(store: Store) -> None:
    first, second = put(store, 2)
    (c,) = claim(store)
    store.turns.take(Turn("n", 2500, requeues=[Requeue(first, c.fence, "requeued:crash", 2500, crash=1, last=1)]))
    store.jobs.cancel(first, 2600)
    store.jobs.retry(first, 2700)
    assert [c.id for c in claim(store, 2)] == [first, second]


def test_queues_do_not_mix(store: Store) -> None:
    (a,), (b,) = put(store, queue="a"), put(store, queue="b")
    taken = store.turns.take(Turn("n", 2000, wants={"a": ["w1", "w2"], "b": ["w3"]}))
    assert [(c.id, c.worker) for c in taken.claims] == [(a, "w1"), (b, "w3")]


def test_later_jobs_are_not_claimed_before_their_time(store: Store) -> None:
    (job,) = put(store, run_at=5000)
    taken = store.turns.take(Turn("n", 4999, wants={"q": ["w"]}))
    assert (taken.claims, taken.next_due) == ([], 5000)
    assert not store.jobs.ready(["q"], 4999)
    assert store.jobs.ready(["q"], 5000)
    assert [c.id for c in claim(store, now=5000)] == [job]


def test_recover_sends_a_dead_nodes_claims_back_once_and_blames_nobody(store: Store) -> None:
    jobs = put(store, 3)
    claim(store, 2, node="dead"), claim(store, 1, node="alive")
    assert store.turns.recover("dead", 9000, "gone") == jobs[:2]
    assert store.turns.recover("dead", 9000, "gone") == []
    row = store.jobs.get(jobs[0])
    assert (row["status"], row["attempt"], row["crashes"]) == ("queued", 0, 0)
    assert names(store, jobs[0]) == ["created", "processing", "requeued:stale"]
    assert store.jobs.get(jobs[2])["status"] == "processing"


def test_a_cancelled_running_job_does_not_go_back_to_the_queue(store: Store) -> None:
    (job,) = put(store)
    (c,) = claim(store)
    assert store.jobs.cancel(job, 2100) == "processing"
    assert store.jobs.cancel(job, 2200) == "processing"
    assert store.jobs.wanted_cancels("n") == [(job, c.fence)]
    store.turns.take(Turn("n", 2500, requeues=[Requeue(job, c.fence, "requeued:crash", 2500, crash=1)]))
    assert store.jobs.get(job)["status"] == "cancelled"
    assert names(store, job) == ["created", "processing", "cancel:requested", "cancelled"]


def test_cancel_and_retry_know_the_states(store: Store) -> None:
    (job,) = put(store)
    with pytest.raises(Conflict, match=f"job {job} is queued"):
        store.jobs.retry(job, 1)
    assert store.jobs.cancel(job, 1) == "queued"
    with pytest.raises(Conflict, match=f"job {job} is cancelled"):
        store.jobs.cancel(job, 1)
    assert store.jobs.retry(job, 1) == "q"
    assert store.jobs.get(job)["status"] == "queued"
    for verb in (store.jobs.cancel, store.jobs.retry):
        with pytest.raises(NotFound, match="no job 999"):
            verb(999, 1)


def test_pages_are_complete_and_newest_first(store: Store) -> None:
    ids = put(store, 25)
    found, cursor = [], None
    while True:
        page, cursor = store.jobs.list(limit=10, cursor=cursor)
        found += [j["id"] for j in page]
        if cursor is None:
            break
    assert found == ids[::-1]
    assert store.jobs.list(status="done") == ([], None)


@pytest.mark.parametrize("text", ["Müller", "100 %", "a_b", 'say "hi"', "C:\\clips", '"who":', "MÜLLER'S"])
def test_a_search_finds_text_as_people_write_it(store: Store, text: str) -> None:
    value = 'Herr Müller, 100 % a_b say "hi" C:\\clips MÜLLER\'S'
    (wanted,) = put(store, args=json.dumps({"who": value}))
    put(store, args=json.dumps({"what": "Herr Moller, 100 percent aXb"}))
    assert [job["id"] for job in store.jobs.list(search=text)[0]] == [wanted]


def test_a_search_looks_at_no_more_than_a_page_of_jobs_and_says_where_to_go_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ostler.store.reading._SEARCHED", 10)
    (wanted,) = put(store, args='{"x": "needle"}')
    put(store, 15)
    assert store.jobs.list(search="needle")[0] == []
    cursor = store.jobs.list(search="needle")[1]
    assert cursor is not None
    found, end = store.jobs.list(search="needle", cursor=cursor)
    assert ([job["id"] for job in found], end) == ([wanted], None)


def test_the_fields_of_a_new_job_are_the_columns_that_are_stored_in_the_same_order(store: Store) -> None:
    written = {field: 100 + n for n, field in enumerate(NewJob._fields)}
    texts = {"task", "queue", "args", "backoff", "limit_key", "unique_key"}
    written = {f: str(v) if f in texts else v for f, v in written.items()} | {"next": None}
    (job,) = store.jobs.enqueue([NewJob(**written)], 1)
    stored = dict(store.db.run("job", id=job)[0])
    assert {f: stored[f] for f in written if f in stored and f != "next"} == {
        f: v for f, v in written.items() if f not in ("next", "unique_for")
    }


def test_ids_are_never_used_twice(store: Store) -> None:
    (first,) = put(store)
    rows(store, "DELETE FROM jobs")
    assert put(store)[0] > first


def test_the_claim_uses_its_index_and_sorts_nothing(store: Store) -> None:
    put(store, 100)
    rows(store, "ANALYZE jobs")
    explain = "EXPLAIN QUERY PLAN " if store.db.dialect == "sqlite" else "EXPLAIN "
    sql = queries.load(store.db.dialect)["claimable"]
    plan = str(rows(store, explain + sql, queue="q", limit=1, full="[]", tasks=None, rank=-(2**31), low=0))
    assert re.search(r"(USING INDEX|Index Scan using) jobs_ready", plan), plan
    assert "TEMP B-TREE" not in plan
    assert "Sort" not in plan


def _claim_all(url: str, folder: str, node: str, start, out) -> None:
    with Store.open(url, Path(folder), durable=False) as store:
        start.wait()
        mine = []
        while claims := store.turns.take(Turn(node, now_ms(), wants={"q": [node] * 7})).claims:
            mine += [(c.id, c.fence) for c in claims]
        out.put((node, mine))


def test_two_nodes_worth_of_claimers_on_1000_jobs_take_each_once(store: Store, store_url: str, tmp_path: Path) -> None:
    put(store, 1000)
    context = multiprocessing.get_context("spawn")
    start, out = context.Event(), context.Queue()
    where = (store_url, str(tmp_path))
    claimers = [context.Process(target=_claim_all, args=(*where, f"node{n}", start, out)) for n in range(4)]
    for c in claimers:
        c.start()
    start.set()
    found = dict(out.get(timeout=60) for _ in claimers)
    for c in claimers:
        c.join()
    taken = [job for mine in found.values() for job, _ in mine]
    assert len(taken) == len(set(taken)) == 1000
    assert all(fence == 1 for mine in found.values() for _, fence in mine)
    for node, mine in found.items():
        assert all(store.jobs.get(job)["node"] == node for job, _ in mine[:5])


def test_a_locked_database_says_busy_and_stores_nothing(tmp_path: Path, store: Store, store_url: str) -> None:
    with Store.open(store_url, tmp_path, busy_timeout=0.05) as other:
        with locked(store), pytest.raises(StoreBusy, match="nothing was stored"):
            put(other)
        stored = put(other)
    assert [job["id"] for job in store.jobs.list()[0]] == stored


def test_a_file_that_is_no_database_and_a_newer_schema_are_refused(tmp_path: Path) -> None:
    (tmp_path / "ostler.db").write_bytes(b"not a database at all, but long enough to be looked at" * 20)
    with pytest.raises(ConfigError, match="not a usable SQLite database"):
        Store.open("", tmp_path)
    newer = tmp_path / "newer"
    Store.open("", newer).close()
    set_version(newer, 99)
    with pytest.raises(ConfigError, match="schema 99"):
        Store.open("", newer)


def set_version(folder: Path, version: int) -> None:
    connection = sqlite3.connect(folder / "ostler.db")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()


def test_migrating_at_once_from_many_threads_is_safe(tmp_path: Path) -> None:
    errors = []

    def open_it() -> None:
        try:
            Store.open("", tmp_path / "new").close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert errors == []


def test_an_enqueue_is_synced_and_a_claim_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd))[1])
    with Store.open("", tmp_path) as durable, Store.open("", tmp_path, durable=False) as quick:
        for jobs in ([NewJob("t", "q", "{}")], [NewJob("t", "q", "{}", unique_key="k"), NewJob("t", "q", "{}")]):
            synced.clear()
            durable.jobs.enqueue(jobs, 1)
            assert synced == [str(tmp_path / "ostler.db-wal")]
        synced.clear()
        (c,) = claim(quick)
        assert synced == []
        assert durable.jobs.hold(c.id, c.fence)
        quick.meta.set("pool_paused:q", "true")
        assert len(synced) == 2
        assert durable.db._connection.execute("PRAGMA journal_mode").fetchone()[0] == "wal"


def test_strange_text_survives(store: Store) -> None:
    args = {"s": 'ü \x00 \ud800 " \\ \n 💥'}
    (job,) = store.jobs.enqueue([NewJob("t", "q", json.dumps(args))], 1)
    (c,) = claim(store)
    assert json.loads(c.args) == args
    store.turns.take(Turn("n", 3, finishes=[Finish(job, c.fence, "done", 1, 2, "done", result=json.dumps(args))]))
    assert store.jobs.get(job)["result"] == args


def test_the_oldest_in_line_is_found_without_counting(store: Store) -> None:
    put(store, now=5000, priority=1)
    put(store, 3, now=7000)
    put(store, now=9000, queue="other")
    put(store, 2, now=4000, queue="limited", limit_key="k", limit_max=1)
    assert store.jobs.oldest() == {"q": 5000, "other": 9000, "limited": 4000}
    claim(store)
    assert store.jobs.oldest()["q"] == 7000
