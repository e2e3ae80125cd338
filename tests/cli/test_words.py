"""Words, board and picture of the live commands: pure, so without a node."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from ostler.cli import top, words
from ostler.cli.board import Board
from ostler.cli.picture import bar, fit, picture, share, spark
from ostler.cli.stream import Event, parse
from ostler.errors import StoreBusy

NOW = 1_700_000_000_000


def worker(number: int = 0, **more):
    return {"name": f"worker:tag:{number}", "component": f"worker:tag:{number}", "node": "n", "node_id": "n@1", "pool": "tag", "id": number, "status": "healthy", "pid": 100 + number,
            "generation": 1, "current_job": None, "task": None, "paused": False, "rss_mb": 40.0, "started_at": NOW - 60_000,
            "restart_count": 0, "restart_at": None, "last_exit": None, **more}  # fmt: skip


def job(number: int, status: str = "processing", **more):
    return {"id": number, "task": "tag", "queue": "tag", "status": status, "progress": None, "stage": None, "worker": "worker:tag:0",
            "node_id": "n@1", "started_at": NOW - 2000, "finished_at": None, "error": None, **more}  # fmt: skip


def queue(name: str | None, **more):
    return {"queue": name, "pending": 0, "scheduled": 0, "running": 0, "completed": 0, "failed": 0, "avg_time": None, "eta": 0.0,
            "paused": False, "workers": 1, "recent": None, **more}  # fmt: skip


def event(topic: str, name: str, value, kind: str = "update"):
    return {"topic": topic, "type": kind, "timestamp": NOW, name: value}


def point(at: int, done: int, **more):
    return {"at": at, "step": 10, "done": done, "run_p50": 0.5, "run_p95": 1.0, "wait_p95": 0.1, **more}


# ---- the stream


def test_frames_are_read_as_they_come_and_comments_are_signs_of_life() -> None:
    lines = b'retry: 1000\n\nid: e-1\ndata: {"topic": "a", "type": "x"}\n\n: keep-alive\n\ndata: {"topic":\ndata: "b"}\n\nid: e-2\ndata: cut'
    found = list(parse(io.BytesIO(lines)))
    assert found == [Event("e-1", {"topic": "a", "type": "x"}), None, Event(None, {"topic": "b"})]


# ---- words


def pool(name: str = "chromium", **more):
    workers = [{"component": f"worker:{name}:{n}", "generation": 1, "status": status, "serves": status == "healthy", "slots": 4, "in_use": used,
                "served": 9, "lifetime": 50, "started_at": NOW} for n, (status, used) in enumerate([("healthy", 3), ("draining", 2)])]  # fmt: skip
    return {
        "pool": name,
        "node_id": "n@1",
        "pools": [name],
        "slots": 4,
        "in_use": 5,
        "free": 1,
        "waiting": 0,
        "paused": False,
        "workers": workers,
        **more,
    }


def test_a_session_pool_is_told_in_words_and_drawn_slot_by_slot() -> None:
    body = event("session:chromium:status", "session", pool(waiting=2, paused=True))
    line = words.line(body, None).plain
    assert "sessions chromium" in line
    assert line.endswith("5 in use, 1 of 4 slots free, 2 waiting, 1 of 2 workers serving (paused)")
    assert words.key(body) != words.key(event("session:chromium:status", "session", pool(node_id="m@1")))
    board = Board("10m")
    assert "slots" not in "\n".join(drawn(board, 120))  # an app without sessions has no such table
    board.apply(body)
    text = "\n".join(drawn(board, 120))
    assert re.search(r"chromium +5 +1 +2 +2 +1/2 +■■■□ +paused", text), text
    for n in range(40):
        board.apply(event(f"session:p{n}:status", "session", pool(f"p{n}")))
    small = drawn(board, 80, 24)
    assert len(small) <= 24 and max(map(len, small)) <= 80


def test_a_model_is_told_in_words_and_two_of_one_task_are_two_objects() -> None:
    state = {"task": "ocr", "model": "org/x:1\x1b", "node_id": "n@1", "state": "BUSY", "reason": "loading\x1b 40 %", "in_flight": 2,
             "waiting": 1, "worker": "worker:ocr:0", "memory_mb": 812.4}  # fmt: skip
    body = event("call:ocr:status", "call", state)
    line = words.line(body, None).plain
    assert "model ocr org/x:1" in line and "BUSY, 2 in flight, 1 waiting, 812 MB (loading  40 %)" in line
    assert words.key(body) != words.key(event("call:ocr:status", "call", {**state, "model": "other"}))


KILLED = {
    "at": NOW,
    "reason": "signal",
    "kind": "crash",
    "code": -9,
    "signal": "SIGKILL",
    "job": None,
    "text": "killed by SIGKILL",
}


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (None, worker(), "healthy, pid 100, 40 MB"),
        (worker(), worker(status="stopped", pid=None, rss_mb=None, last_exit=KILLED), "healthy → stopped (killed by SIGKILL)"),
        (worker(), worker(current_job=7, task="tag"), "running job 7 tag"),
        (worker(current_job=7, task="tag"), worker(), "idle"),
        (worker(), worker(pid=9, generation=2, last_exit=KILLED), "pid 9"),
        (worker(), worker(paused=True), "paused"),
        (worker(), worker(rss_mb=80.2), "80 MB"),
        (worker(), worker(restart_count=1), "healthy"),
        (worker(), worker(status="failed", last_exit={**KILLED, "text": "exit code 3"}), "healthy → failed (exit code 3)"),
    ],
)  # fmt: skip
def test_a_workers_change_in_words(before, now, said: str) -> None:
    assert words.worker(now, before).plain == said


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (None, job(1, "queued"), "queued"),
        (None, job(1), "processing on worker:tag:0"),
        (job(1), job(1, progress=40.4, stage="decoding"), "processing 40 % decoding"),
        (job(1), job(1, "done", finished_at=NOW), "processing → done after 2.0 s"),
        (
            job(1),
            job(1, "failed", error={"code": "BAD", "message": "a\x1b[2J\nb"}),
            "processing → failed (BAD: a [2J b)",
        ),
    ],
)
def test_a_jobs_change_in_words(before, now, said: str) -> None:
    assert words.job(now, before).plain == said


def test_every_event_is_one_line_with_its_time_and_object() -> None:
    told = [
        (event("queue:tag:status", "queue", queue("tag", pending=12, eta=4.0, failed=1)), "queue tag", "12 waiting, 0 running, 0 done, 1 failed, empty in 4.0 s"),
        (event("queue:status", "queue", queue(None, paused=True)), "all queues", "(paused)"),
        (event("system:health", "health", {"status": "degraded", "errors": ["a", "b"]}), "health", "degraded: a; b"),
        (event("system:incidents", "incident", {"id": 1, "node": "n", "level": "error", "text": "it\nfell"}), "incident", "it fell"),
        (event("stream", "stream", {"reason": "gone"}, "resync"), "stream", "gone: the whole state follows"),
        (event("queue:jobs", "stream", {"reason": "too many"}, "resync"), "queue:jobs", "too many"),
        (event("stream", "stream", {"node": "n", "epoch": "e"}, "live"), "stream", "changes follow"),
        (event("later:x:status", "later", {"calls": 1}), "later:x:status", '{"calls": 1}}'),
    ]  # fmt: skip
    for body, subject, said in told:
        line = words.line(body, None).plain
        assert re.match(rf"\d\d:\d\d:\d\d {re.escape(subject)} .*{re.escape(said)}$", line), line


def test_objects_of_one_topic_are_told_apart() -> None:
    bodies = [
        event("queue:jobs", "job", job(1)),
        event("queue:jobs", "job", job(2)),
        event("worker:tag:0:status", "worker", worker(id=1)),
    ]
    bodies += [event("system:incidents", "incident", {"id": 1, "node": n}) for n in "ab"]
    assert len({words.key(body) for body in bodies}) == 5


# ---- the board


def test_a_resync_of_the_stream_forgets_everything_but_the_counters() -> None:
    board = Board("10m")
    board.counters({"step": 10, "points": [point(NOW, 3)], "whole": point(NOW, 6)})
    for body in (
        event("worker:tag:0:status", "worker", worker()),
        event("queue:jobs", "job", job(1)),
        event("stream", "stream", {}, "live"),
    ):
        board.apply(body)
    assert (board.is_live, list(board.jobs), list(board.workers), board.counters_due) == (
        True,
        [1],
        ["n@1/worker:tag:0"],
        False,
    )
    board.apply(event("stream", "stream", {"reason": "anew"}, "resync"))
    assert (board.is_live, board.jobs, board.workers, board.counters_due) == (False, {}, {}, True)
    assert board.points


def test_only_running_jobs_stay_and_what_was_told_while_listing_wins() -> None:
    board = Board("10m")
    board.apply(event("queue:jobs", "job", job(1)))
    board.apply(event("queue:jobs", "stream", {"reason": "many"}, "resync"))
    assert board.jobs_missed
    board.relist()
    board.apply(event("queue:jobs", "job", job(2, "done")))  # ended after the list below was made
    board.apply(event("queue:jobs", "job", job(4)))
    board.listed([job(2), job(3)])
    assert (sorted(board.jobs), board.jobs_missed) == ([3, 4], False)


def test_missed_jobs_are_asked_for_until_they_are_had(monkeypatch) -> None:
    asked: list[str] = []

    def request(_known, _method, path):
        asked.append(path)
        if len(asked) == 1:
            raise StoreBusy("not now")
        return {"jobs": [job(5)]}

    monkeypatch.setattr(top.client, "request", request)
    feed = top.Feed(None, "10m")
    feed.board.counters_due, feed.board.jobs_missed = False, True
    with pytest.raises(StoreBusy):
        feed._ask()
    feed._ask()
    feed._ask()
    assert (len(asked), list(feed.board.jobs)) == (2, [5])
    assert "status=processing" in asked[1]


def test_the_stream_carries_the_counters_on() -> None:
    board = Board("10m")
    board.counters({"step": 10, "points": [point(NOW - 30_000, 6)], "whole": point(NOW, 6)})
    board.apply(event("queue:status", "queue", queue(None, recent=point(NOW, 4))))
    assert board.series(NOW, "done", 60)[-4:] == [6, 0, 0, 4]
    assert board.series(NOW, "run_p95", 60)[-4:] == [1, 0, 0, 1]
    assert sum(board.series(NOW, "done", 7)) == 10
    assert len(board.series(NOW, "done", 7)) <= 7
    assert board.rate(NOW + 10_000 - 1) == pytest.approx(10 / 60, rel=0.01)
    board.apply(event("queue:status", "queue", queue(None, recent=point(NOW, 9, step=600))))
    assert sum(board.series(NOW, "done", 60)) == 10  # of another width: not comparable


# ---- the picture


def test_room_is_shared_so_that_small_tables_are_whole() -> None:
    assert share(10, [2, 3, 40, 1]) == [2, 3, 4, 1]
    assert share(100, [2, 3]) == [2, 3]
    assert share(3, [5, 5, 5, 5]) == [0, 1, 1, 1]
    assert share(-4, [5, 0]) == [0, 0]


def test_where_not_all_fit_the_most_wanted_are_shown_in_their_order() -> None:
    rows = [(0, "a"), (5, "b"), (0, "c"), (9, "d")]
    assert fit(rows, 4) == (rows, 0)
    assert fit(rows, 3) == ([rows[1], rows[3]], 2)
    assert fit(rows, 1) == ([], 4)
    assert fit(rows[:1], 4, total=20) == (rows[:1], 19)


def test_lines_and_bars() -> None:
    assert spark([0, 1, 2, 4]) == "▁▃▅█"
    assert spark([0, 0]) == "▁▁"
    assert [bar(p, 4).plain for p in (0, 50, 100, 250, -1)] == ["╌╌╌╌", "━━╌╌", "━━━━", "━━━━", "╌╌╌╌"]


def busy_board(n: int) -> Board:
    board = Board("10m")
    board.counters({"step": 10, "points": [point(NOW - 10_000, 6)], "whole": point(NOW, 6)})
    board.apply(event("stream", "stream", {"node": "host", "started_at": NOW - 5000}, "live"))
    board.apply(
        event(
            "system:health", "health", {"status": "degraded", "errors": [f"reason {i} " + "x" * 200 for i in range(n)]}
        )
    )
    board.apply(event("queue:status", "queue", queue(None, running=n, pending=1234, eta=None)))
    for i in range(n):
        board.apply(event(f"queue:q{i}:status", "queue", queue(f"q{i}", pending=i, eta=90.0, avg_time=0.5)))
        board.apply(
            event(
                f"worker:tag:{i}:status",
                "worker",
                worker(i, status="crashed" if i == n - 1 else "healthy", last_exit=KILLED, restart_at=NOW + 3000),
            )
        )
        board.apply(event("queue:jobs", "job", job(i, progress=50.0, stage="s" * 300)))
        board.apply(
            event(
                "system:incidents",
                "incident",
                {"id": i, "node": "n", "at": NOW + i, "level": "info", "text": "\x1b[31m" + "y" * 300},
            )
        )
    return board  # fmt: skip


def drawn(board: Board, width: int, height: int | None = None) -> list[str]:
    console = Console(width=width, file=io.StringIO(), highlight=False, markup=False)
    console.print(picture(board, NOW, width, height))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 40), (100, 30), (60, 20), (200, 100)])
@pytest.mark.parametrize("n", [0, 1, 3, 40])
def test_it_fits_any_terminal(width: int, height: int, n: int) -> None:
    lines = drawn(busy_board(n), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "\x1b" not in text
    if n == 40:
        assert len(lines) == height  # all the room is used
        assert text.count("… and ") >= 3
        assert "worker:tag:39" in text  # the crashed one comes first
    if n in (1, 3):
        assert f"worker:tag:{n - 1}" in text
        assert "killed by SIGKILL, starts in 3.0 s" in text or width < 100


def test_without_a_height_nothing_is_left_out() -> None:
    text = "\n".join(drawn(busy_board(40), 160))
    assert "… and" not in text
    assert all(f"worker:tag:{i}" in text and f"q{i} " in text and f"reason {i} " in text for i in range(40))


def test_an_empty_node_and_a_lost_one_say_so() -> None:
    text = "\n".join(drawn(Board("10m"), 80, 24))
    assert all(said in text for said in ("no queues", "no workers", "no running jobs", "no incidents", "no runs yet"))
    board = busy_board(1)
    board.lost = True
    assert "connection lost, retrying" in drawn(board, 80, 24)[0]
