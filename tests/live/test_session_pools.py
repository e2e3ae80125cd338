"""Session pools in the live state, in health, in incidents and in metrics."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from ostler.events import Bus, SessionBegan, SessionEnded, SessionsTouched, WorkerBroken, WorkerDrained
from ostler.live import incidents, log
from ostler.live.condition import unserved
from ostler.live.incidents import Incidents
from ostler.store import Store
from ostler.web.session_metrics import SessionMetrics
from tests.live.test_broker import read
from tests.live.test_watch import Scene, on_stage
from tests.web.session_pools import Pools

HUNG = WorkerBroken("worker:chromium:1", "chromium", "hung", "two probes in a row were not answered", 5)
DRAINED = WorkerDrained("worker:chromium:4", "chromium", 30.0, 2)


def ended(session: str, reason: str = "killed", by: str | None = "user:0") -> SessionEnded:
    return SessionEnded(session, "chromium", "worker:chromium:0", "token:a", reason, 12.5, by)


# ---- the stream


def test_a_pool_is_told_when_it_changes_and_not_when_only_its_figures_move(sqlite_store: Store) -> None:
    async def play(scene: Scene) -> None:
        pools = scene.watch._sessions = Pools(scene.bus)
        client = await scene.follow("session:*:status")
        first = {e["session"]["pool"]: e["session"] for e in read(client.take()) if "session" in e}
        assert {name: (s["slots"], s["in_use"], s["free"], s["waiting"]) for name, s in first.items()} == {
            "chromium": (32, 35, 0, 12),
            "terminal": (10, 5, 5, 0),
        }
        assert first["chromium"]["workers"][4]["status"] == "draining"
        pools.workers["chromium"][0] |= {"probe_ms": 7.5, "mb": 999.0}
        scene.bus.send(SessionsTouched())
        await scene.look()
        assert client.take() == b""
        assert pools.kill(pools.sessions[0]["id"], "user:0")
        await scene.look()
        (told,) = [e for e in read(client.take()) if "session" in e]
        assert (told["topic"], told["type"]) == ("session:chromium:status", "session_update")
        assert (told["session"]["in_use"], told["session"]["free"]) == (34, 1)

    on_stage(sqlite_store, play)


# ---- health


def test_health_says_why_clients_get_no_session() -> None:
    pools = Pools()
    assert unserved(pools) == ["clients have waited more than 10 s for sessions chromium: all 32 slots are in use"]
    pools.waiting["chromium"] = [("token:a", 0, 9.0)]
    assert unserved(pools) == []
    pools.stop_all()
    (words,) = unserved(pools)
    assert words.startswith("no worker serves sessions chromium, so nobody can connect;")
    pools.workers["chromium"][0]["status"] = "starting"
    assert unserved(pools) == []
    pools.pause()
    assert "sessions chromium are paused, and clients wait; to resume: ostler resume chromium" in unserved(pools)


def test_the_nodes_health_is_degraded_then(sqlite_store: Store) -> None:
    async def play(scene: Scene) -> None:
        pools = scene.watch._sessions = Pools(scene.bus)
        client = await scene.follow("system:health")
        (health,) = [e["health"] for e in read(client.take()) if "health" in e]
        assert health["status"] == "degraded" and "chromium" in health["errors"][0]
        pools.empty_line()
        scene.bus.send(SessionsTouched())
        await scene.look()
        (health,) = [e["health"] for e in read(client.take()) if "health" in e]
        assert health == {"status": "healthy", "errors": []}

    on_stage(sqlite_store, play)


# ---- incidents


@pytest.mark.parametrize(
    ("event", "level", "says"),
    [
        (HUNG, "warning", "worker:chromium:1 hung: two probes in a row were not answered; it is replaced, and 5 sessions ended with it"),
        (DRAINED, "warning", "worker:chromium:4 reached its drain limit after 30 s: 2 sessions ended"),
        (ended("s7"), "info", "session s7 of chromium (token:a) was ended by user:0"),
        (DRAINED._replace(cut=0), None, None),
        (ended("s7", "client"), None, None),
    ],
)  # fmt: skip
def test_what_an_operator_wants_to_know_of_sessions_is_an_incident(event, level, says, caplog) -> None:
    async def main() -> None:
        bus = Bus()
        told = Incidents("n1", bus, None)
        bus.listen(log.tell)
        with caplog.at_level("INFO", logger="ostler"):
            bus.send(event)
        assert [(i.level, i.text) for i in told.last] == ([(level, says)] if says else [])
        assert [r.message for r in caplog.records] == ([says] if says else [])

    asyncio.run(main())


def test_many_sessions_ended_by_hand_are_one_incident() -> None:
    async def main() -> None:
        bus = Bus()
        told = Incidents("n1", bus, None)
        for number in range(200):
            bus.send(ended(f"s{number}"))
        (one,) = told.last
        assert one.count == 200
        assert one.text == "200 sessions of chromium were ended by operators, the last one, session s199, by user:0"

    asyncio.run(main())


# ---- metrics


def exposed(metrics: SessionMetrics) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(metrics)
    lines = generate_latest(registry).decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_metrics_count_what_began_and_ended_and_show_what_there_is() -> None:
    bus = Bus()
    metrics = SessionMetrics(bus)
    for event in (
        SessionBegan("chromium", 0.3),
        SessionBegan("chromium", 40.0),
        ended("s1"),
        ended("s2", "client"),
        DRAINED,
        HUNG,
    ):
        bus.send(event)
    assert exposed(metrics) == {}  # an app without sessions has no metrics of them
    metrics.sessions = Pools(bus)
    found = exposed(metrics)
    pool = 'pool="chromium"'
    expected = {
        f"ostler_sessions_live{{{pool}}}": 35,
        f"ostler_sessions_slots{{{pool}}}": 32,
        f"ostler_sessions_free{{{pool}}}": 0,
        f"ostler_sessions_waiting{{{pool}}}": 12,
        f'ostler_sessions_total{{{pool},reason="killed"}}': 1,
        f'ostler_sessions_total{{{pool},reason="client"}}': 1,
        f'ostler_session_wait_seconds_bucket{{le="0.5",{pool}}}': 1,
        f"ostler_session_wait_seconds_count{{{pool}}}": 2,
        f'ostler_session_drain_seconds_bucket{{le="30.0",{pool}}}': 1,
        f"ostler_session_drain_cut_total{{{pool}}}": 2,
        f'ostler_session_workers_broken_total{{{pool},what="hung"}}': 1,
        f"ostler_session_seconds_sum{{{pool}}}": 25,
        f'ostler_session_workers{{{pool},status="draining"}}': 1,
        f'ostler_session_bytes_total{{direction="out",{pool}}}': 1_400_000_000,
        f"ostler_session_strikes_total{{{pool}}}": 4,
        f"ostler_session_expired_total{{{pool}}}": 1,
        f'ostler_session_worker_served{{{pool},worker="worker:chromium:0"}}': 31,
    }
    assert {name: found.get(name) for name in expected} == expected


def test_the_words_of_one_incident_are_those_of_the_log() -> None:
    assert incidents.killed(ended("s1", by=None), 1) == "session s1 of chromium (token:a) was ended"
    assert "1 session ended with it" in incidents.broken(HUNG._replace(sessions=1))
    assert incidents.broken(HUNG._replace(sessions=0)).endswith("it is replaced")
