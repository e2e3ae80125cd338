"""The broker without a network: a client is a place in the numbering, never a buffer."""

from __future__ import annotations

import json

import pytest

from ostler.live import topics
from ostler.live.broker import KEEP_ALIVE, Broker, Client


def read(data: bytes) -> list[dict]:
    """The events of some frames, each with its `id`; comments are left out."""
    events = []
    for frame in data.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in frame.splitlines() if not line.startswith(":"))
        if "data" in fields and '"queue:status"' not in fields["data"]:
            events.append({**json.loads(fields["data"]), "id": fields.get("id")})
    return events


def brief(data: bytes) -> list[tuple[str, str, object]]:
    """(topic, type, the job's status, or the reason of a resync)."""
    found = []
    for e in read(data):
        inner = e.get("job") or e.get("stream") or e.get("health")
        found.append((e["topic"], e["type"], inner.get("status") or inner.get("reason")))
    return found


LIVE = ("stream", "live", None)


class Stage:
    def __init__(self) -> None:
        self.broker = Broker("e1", "n1")
        self.broker.publish("queue:status", "queue_update", "queue", {})  # a node always has something to tell

    def job(self, job: int, status: str) -> bool:
        return self.broker.publish("queue:jobs", "job_update", "job", {"id": job, "status": status}, key=str(job))

    def health(self, status: str) -> bool:
        return self.broker.publish("system:health", "health_update", "health", {"status": status})

    def follow(self, text: str = "*", last: str | None = None) -> Client:
        return self.broker.follow(topics.parse(text), last)

    @property
    def id(self) -> str:
        return f"e1-{self.broker.seq}"


@pytest.fixture
def stage() -> Stage:
    return Stage()


def job(status: str) -> tuple[str, str, str]:
    return ("queue:jobs", "job_update", status)


def health(status: str) -> tuple[str, str, str]:
    return ("system:health", "health_update", status)


def resync(why: str, topic: str = "stream") -> tuple[str, str, str]:
    return (topic, "resync", why)


def test_first_the_whole_state_then_changes_only(stage: Stage) -> None:
    stage.health("healthy")
    stage.job(1, "queued")
    client = stage.follow()
    assert brief(client.take()) == [health("healthy"), job("queued"), LIVE]
    assert client.take() == b""
    stage.job(1, "processing")
    assert brief(client.take()) == [job("processing")]
    assert client.take() == b""


def test_every_event_has_the_envelope_and_a_number_in_order(stage: Stage) -> None:
    stage.health("healthy")
    stage.job(1, "queued")
    first, second, live = read(stage.follow().take())
    assert list(first) == ["topic", "type", "timestamp", "health", "id"]
    assert list(second) == ["topic", "type", "timestamp", "job", "id"]
    assert live["stream"] == {"node": "n1", "epoch": "e1", "started_at": stage.broker.started_at, "keepalive": 15.0}
    assert [first["id"], second["id"], live["id"]] == ["e1-2", "e1-3", "e1-3"]
    assert isinstance(first["timestamp"], int)


def test_an_empty_node_still_says_that_it_is_live(stage: Stage) -> None:
    client = stage.follow("worker:nobody:*:status")
    assert brief(client.take()) == [LIVE]
    stage.health("healthy")
    assert client.take() == b""


def test_what_did_not_change_is_not_published_and_wakes_nobody(stage: Stage) -> None:
    client = stage.follow()
    assert stage.job(1, "queued") is True
    assert stage.broker.flush() == 1
    client.take()
    seq = stage.broker.seq
    assert stage.job(1, "queued") is False
    assert stage.broker.flush() == 0
    assert not client.wake.is_set()
    assert (stage.broker.seq, client.take()) == (seq, b"")


def test_only_those_who_follow_the_topic_are_woken(stage: Stage) -> None:
    jobs, well = stage.follow("queue:jobs"), stage.follow("system:health")
    jobs.take(), well.take()
    stage.job(1, "queued")
    assert stage.broker.flush() == 1
    assert (jobs.wake.is_set(), well.wake.is_set()) == (True, False)
    assert (brief(jobs.take()), well.take()) == ([job("queued")], b"")


def test_a_client_that_did_not_take_gets_the_newest_state_and_no_history(stage: Stage) -> None:
    slow = stage.follow("queue:jobs")
    slow.take()
    for n in range(10_000):
        stage.job(n % 10, f"state {n}")
    got = slow.take()
    assert brief(got) == [job(f"state {n}") for n in range(9990, 10_000)]
    assert len(stage.broker._entries) == len(stage.broker._values) == 11


def test_clients_of_the_same_patterns_get_the_same_bytes_made_once(stage: Stage) -> None:
    clients = [stage.follow("queue:jobs,system:health") for _ in range(3)]
    clients.append(stage.follow("system:health,queue:jobs"))  # in whatever order
    stage.job(1, "queued")
    taken = [c.take() for c in clients]
    stage.job(1, "done")
    stage.job(2, "done")
    taken = [c.take() for c in clients]
    assert brief(taken[0]) == [job("done")] * 2
    assert all(t is taken[0] for t in taken)
    assert len(stage.broker._groups) == 1


def test_what_was_made_for_one_alone_is_not_kept(stage: Stage) -> None:
    alone = stage.follow("queue:jobs")
    stage.job(1, "queued")
    assert brief(alone.take()) == [job("queued"), LIVE]
    assert alone.group.made == (-1, -1, b"")


def test_clients_of_one_group_at_different_places_each_get_their_own(stage: Stage) -> None:
    here, there = stage.follow("queue:jobs"), stage.follow("queue:jobs")
    here.take(), there.take()
    stage.job(1, "queued")
    assert brief(here.take()) == [job("queued")]
    stage.job(2, "queued")
    assert [e["job"]["id"] for e in read(here.take())] == [2]
    assert [e["job"]["id"] for e in read(there.take())] == [1, 2]
    late = stage.follow("queue:jobs")
    assert [e["job"]["id"] for e in read(late.take())[:-1]] == [1, 2]


# ---- coming back


def test_who_comes_back_gets_exactly_what_changed_and_then_live(stage: Stage) -> None:
    for n in range(1, 5):
        stage.job(n, "queued")
    seen = stage.id
    stage.job(2, "processing")
    stage.job(5, "queued")
    stage.job(2, "done")
    stage.health("healthy")
    back = read(stage.follow("queue:jobs", seen).take())
    assert [(e["job"]["id"], e["job"]["status"]) for e in back[:-1]] == [(5, "queued"), (2, "done")]
    assert (back[-1]["type"], back[-1]["id"]) == ("live", stage.id)


def test_who_missed_nothing_gets_only_live(stage: Stage) -> None:
    stage.job(1, "queued")
    assert brief(stage.follow("*", stage.id).take()) == [LIVE]
    assert brief(stage.follow("*", f" {stage.id} ").take()) == [LIVE]


def test_a_snapshot_that_broke_off_is_gone_on_with(stage: Stage) -> None:
    for n in range(1, 6):
        stage.job(n, "queued")
    stage.job(1, "done")  # moves to the end
    half = [e["id"] for e in read(stage.follow("queue:jobs").take())][2]
    rest = read(stage.follow("queue:jobs", half).take())
    assert [e["job"]["id"] for e in rest[:-1]] == [5, 1]


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ("e0-1", "the node was started anew"),
        ("garbage", "the node was started anew"),
        ("-", "the node was started anew"),
        ("e1", "the node was started anew"),
        ("1", "the node was started anew"),
        ("e1-4", "that id was never given"),
        ("e1-", "that id was never given"),
        ("e1-x", "that id was never given"),
        ("e1-²", "that id was never given"),
        ("e1-٣", "that id was never given"),
        ("e1-" + "9" * 5000, "that id was never given"),
        ("e1-+1", "that id was never given"),
    ],
)
def test_an_id_that_says_nothing_is_answered_with_resync_and_everything(stage: Stage, last: str, why: str) -> None:
    stage.job(1, "queued")
    stage.health("healthy")
    got = stage.follow("*", last).take()
    assert brief(got) == [resync(why), job("queued"), health("healthy"), LIVE]
    assert read(got)[0]["id"] is None  # a resync is no place to come back to


@pytest.mark.parametrize("last", [None, ""])
def test_no_id_is_no_resync(stage: Stage, last: str | None) -> None:
    stage.job(1, "queued")
    assert brief(stage.follow("*", last).take()) == [job("queued"), LIVE]


# ---- forgotten


def test_who_did_not_see_the_end_of_what_was_forgotten_is_told_to_resync(stage: Stage) -> None:
    follower, other = stage.follow("queue:jobs"), stage.follow("system:health")
    seer = stage.follow("queue:jobs,worker:*:status")
    follower.take(), other.take()
    before = stage.id
    stage.job(1, "queued")
    stage.job(2, "queued")
    seer.take()
    stage.broker.forget("queue:jobs", "1")
    again = [resync("more was missed than can be told"), job("queued"), LIVE]
    assert brief(follower.take()) == again
    assert follower.take() == b""  # once
    assert seer.take() == b""  # had seen it
    assert other.take() == b""  # does not follow it
    assert brief(stage.follow("queue:jobs", before).take()) == again
    assert [e["job"]["id"] for e in read(stage.follow("queue:jobs").take())[:-1]] == [2]


def test_what_was_forgotten_is_news_when_it_is_there_again(stage: Stage) -> None:
    client = stage.follow("queue:jobs")
    stage.job(1, "queued")
    client.take()
    stage.broker.forget("queue:jobs", "1")
    stage.broker.forget("queue:jobs", "never there")
    assert stage.job(1, "queued") is True
    assert brief(client.take()) == [job("queued")]


def test_many_objects_that_come_and_go_leave_nothing_behind(stage: Stage) -> None:
    client = stage.follow()
    for n in range(5000):
        stage.job(n, "done")
        stage.broker.forget("queue:jobs", str(n))
    client.take()
    broker = stage.broker
    assert (len(broker._entries), len(broker._values), len(broker._forgotten)) == (1, 1, 1)
    assert len(client.group.matched) == 2


# ---- more than is told


def test_missed_is_seen_by_those_who_follow_and_is_no_part_of_later_snapshots(stage: Stage) -> None:
    there, elsewhere = stage.follow("queue:jobs"), stage.follow("system:health")
    there.take(), elsewhere.take()
    stage.job(1, "queued")
    seen = stage.id
    stage.broker.missed("queue:jobs", "too many")
    stage.job(2, "queued")
    assert brief(there.take()) == [job("queued"), resync("too many", "queue:jobs"), job("queued")]
    assert elsewhere.take() == b""
    assert brief(stage.follow("queue:jobs").take()) == [job("queued"), job("queued"), LIVE]
    assert brief(stage.follow("queue:jobs", seen).take()) == [resync("too many", "queue:jobs"), job("queued"), LIVE]


def test_missed_again_is_told_again(stage: Stage) -> None:
    client = stage.follow("queue:jobs")
    client.take()
    for _ in range(2):
        stage.broker.missed("queue:jobs", "too many")
        assert brief(client.take()) == [resync("too many", "queue:jobs")]


# ---- keep-alive, leaving, the end


def test_waiting_for_a_slow_client_is_not_taken_for_work(stage: Stage) -> None:
    for _ in range(100):
        stage.broker.sent(0.0001)
    assert stage.broker.spent == pytest.approx(0.01)
    stage.broker.sent(30.0)
    assert stage.broker.spent < 0.02
    stage.broker.flush()
    assert stage.broker.spent == 0.0


def test_a_keep_alive_is_sent_only_when_nothing_was_said(stage: Stage) -> None:
    client = stage.follow("queue:jobs")
    client.take()
    stage.broker.tick()  # the snapshot was said since the last one
    assert client.take() == b""
    for _ in range(3):
        client.wake.clear()
        stage.broker.tick()
        assert client.wake.is_set()
        assert client.take() == KEEP_ALIVE
        assert client.take() == b""
    stage.job(1, "queued")
    client.take()
    client.wake.clear()
    stage.broker.tick()
    assert not client.wake.is_set()
    assert client.take() == b""
    stage.broker.tick()
    assert client.take() == KEEP_ALIVE


def test_a_page_can_hear_keep_alives_as_events() -> None:
    broker = Broker("e1", "n1")
    page = broker.follow(topics.parse("*"), None, ping=True)
    page.take()
    broker.tick()
    broker.tick()
    assert page.take() == b": keep-alive\nevent: ping\ndata: {}\n\n"


def test_something_to_say_takes_the_place_of_a_keep_alive(stage: Stage) -> None:
    client = stage.follow("queue:jobs")
    client.take()
    stage.broker.tick()
    stage.broker.tick()
    stage.job(1, "queued")
    assert brief(client.take()) == [job("queued")]
    assert client.take() == b""


def test_a_keep_alive_moves_no_place(stage: Stage) -> None:
    client = stage.follow("queue:jobs")
    client.take()
    stage.broker.tick()
    stage.broker.tick()
    client.take()
    stage.job(1, "queued")
    assert brief(client.take()) == [job("queued")]


def test_leaving_frees_the_group_with_its_last_client(stage: Stage) -> None:
    one, two = stage.follow("queue:jobs"), stage.follow("queue:jobs")
    assert (stage.broker.clients, stage.broker.wanted("queue:jobs")) == (2, True)
    stage.broker.leave(one)
    stage.broker.leave(one)  # twice is once
    assert (stage.broker.clients, len(stage.broker._groups)) == (1, 1)
    stage.broker.leave(two)
    assert (stage.broker.clients, stage.broker._groups, stage.broker.wanted("queue:jobs")) == (0, {}, False)


def test_who_left_twice_does_not_take_the_group_of_who_came_meanwhile(stage: Stage) -> None:
    gone = stage.follow("queue:jobs")
    stage.broker.leave(gone)
    heir = stage.follow("queue:jobs")
    heir.take()
    stage.broker.leave(gone)  # a stream says it twice: when it saw the client go, and at its own end
    stage.job(1, "queued")
    assert stage.broker.flush() == 1
    assert (heir.wake.is_set(), stage.broker.clients) == (True, 1)


def test_closing_wakes_and_ends_all(stage: Stage) -> None:
    clients = [stage.follow("queue:jobs"), stage.follow()]
    for client in clients:
        client.take()
    stage.broker.close()
    assert stage.broker.closed
    assert all(c.closed and c.wake.is_set() for c in clients)
