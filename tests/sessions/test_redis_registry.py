"""The registry on Redis or Valkey: keys that people can read, commands by hand, and a server that forgets, restarts or is away."""

from __future__ import annotations

import asyncio
import builtins
import json
import time

import pytest

from ostler import config
from ostler.errors import ConfigError, RegistryAway
from ostler.sessions import redis_rows, redis_server
from ostler.sessions.redis_registry import RedisRegistry
from ostler.sessions.registry import WorkerKey
from ostler.store.nodes import NodeRow
from tests.sessions.registries import (
    WORKER,
    YES,
    RedisBackend,
    asks,
    beat,
    given_up,
    in_use,
    no,
    on_a_loop,
    over,
    redis,
    server,
    worker,
)

assert redis and server  # fixtures
ID = "a-1-chromium-0-1"
FIELD = f"chromium:{ID}"


# ---- keys


@on_a_loop
async def test_the_keys_are_those_that_one_looks_for_with_redis_cli(redis: RedisBackend) -> None:
    look = redis.server.client
    registry = await redis.node()
    before = int(time.time())
    await registry.announce(worker())
    assert await registry.turn([], [asks("x"), asks("y")]) == [YES, YES]
    await registry.turn([over("x")], [])
    found = look.hgetall(f"worker:{FIELD}")
    expected = {"browserType": "chromium", "wsEndpoint": "ws://a:8356/sessions/chromium", "status": "available"}
    assert {name: found[name] for name in expected} == expected
    assert before <= int(found["lastHeartbeat"]) <= int(time.time())
    assert 0 < look.ttl(f"worker:{FIELD}") <= 30
    assert look.hgetall("cluster:active_connections") == {FIELD: "1"}
    assert look.hgetall("cluster:lifetime_connections") == {FIELD: "2"}
    (row,) = look.hgetall(f"ostler:rows:{FIELD}").items()
    assert row[0] == "y" and json.loads(row[1])["owner"] == "token:ci"
    look.expire(f"worker:{FIELD}", 5)
    await registry.beat([beat("y", status="draining", served=2)])
    assert look.ttl(f"worker:{FIELD}") > 5
    assert look.hget(f"worker:{FIELD}", "status") == "draining"
    await registry.leave(WORKER, "drained", "")
    assert look.keys("*") == []


def test_ids_in_keys_are_safe_and_differ_between_starts_of_a_node() -> None:
    one = redis_rows.worker_id("we b:1@3fa9c2ffffff", worker("worker:my pool:3", 7, pool="my pool"))
    assert one == "we-b-1-3fa9c2-my-pool-3-7"
    assert one != redis_rows.worker_id("we b:1@aaaaaa000000", worker("worker:my pool:3", 7, pool="my pool"))


@on_a_loop
async def test_an_admission_costs_the_same_however_many_workers_there_are(redis: RedisBackend) -> None:
    a, b = await redis.node("a"), await redis.node("b")
    await a.announce(worker(lifetime=0))

    def commands() -> dict[str, int]:
        stats = redis.server.client.info("commandstats")
        quiet = ("cmdstat_info", "cmdstat_blpop", "cmdstat_mget", "cmdstat_hello", "cmdstat_client|setinfo")
        return {name: told["calls"] for name, told in stats.items() if name not in quiet}

    async def cost(n: int) -> dict[str, int]:
        before = commands()
        assert await a.turn([over(f"s{n - 1}")], [asks(f"s{n}")]) == [YES]
        return {name: calls - before.get(name, 0) for name, calls in commands().items() if calls != before.get(name, 0)}

    await a.turn([], [asks("s0")])
    first = await cost(1)
    for n in range(50):
        await b.announce(worker(f"worker:chromium:{n}"))
    assert await cost(2) == first
    assert not {"cmdstat_keys", "cmdstat_scan", "cmdstat_hgetall", "cmdstat_hkeys"} & first.keys()


# ---- commands by hand


@on_a_loop
async def test_a_command_set_by_hand_is_obeyed_also_after_it_has_expired(redis: RedisBackend) -> None:
    look = redis.server.client
    registry = await redis.node()
    rung = asyncio.Event()
    registry.rung = rung.set
    await registry.announce(worker())
    assert await registry.turn([], [asks("x")]) == [YES]
    look.set(f"worker:cmd:{ID}", "something else")
    assert await registry.beat([beat("x", served=1)]) == {WORKER: "serve"}
    look.set(f"worker:cmd:{ID}", "shutdown", ex=60)
    async with asyncio.timeout(30):
        await rung.wait()
    assert await registry.turn([], [asks("y")]) == [no("draining")]
    assert await registry.beat([beat("x", served=1)]) == {WORKER: "drain"}
    look.delete(f"worker:cmd:{ID}")
    assert await registry.beat([beat("x", status="draining", served=1)]) == {WORKER: "drain"}
    look.flushall()
    assert await registry.beat([beat("x", status="draining", served=1)]) == {WORKER: "drain"}


@on_a_loop
async def test_an_order_of_another_node_wakes_the_node_that_has_the_session(redis: RedisBackend) -> None:
    a, b = await redis.node("a"), await redis.node("b")
    rung = asyncio.Event()
    a.rung = rung.set
    await a.announce(worker())
    assert await a.turn([], [asks("x")]) == [YES]
    assert await b.end("x")
    async with asyncio.timeout(30):
        await rung.wait()
    assert await a.orders() == ["x"]


# ---- a server that forgets


def slots_of(redis: RedisBackend) -> tuple[str | None, str | None]:
    look = redis.server.client
    return look.hget("cluster:active_connections", FIELD), look.hget("cluster:lifetime_connections", FIELD)


@on_a_loop
async def test_after_flushall_nobody_is_admitted_too_many_and_a_heartbeat_brings_all_back(redis: RedisBackend) -> None:
    registry = await redis.node()
    other = WorkerKey("worker:chromium:1", 1)
    await registry.announce(worker(slots=3, lifetime=5))
    await registry.announce(worker(*other))
    assert await registry.turn([], [asks("x"), asks("y"), asks("z", other)]) == [YES, YES, YES]
    redis.server.client.flushall()
    assert await registry.turn([], [asks("v"), asks("w")]) == [YES, no("full")]
    assert slots_of(redis) == ("3", "3")
    redis.server.client.flushall()
    await registry.turn([over("x")], [])
    redis.server.client.flushall()
    assert await registry.beat([beat("y", "v", served=3), beat("z", worker=other, served=1)]) == {
        WORKER: "serve",
        other: "serve",
    }
    assert await in_use(registry) == {WORKER: (2, 3), other: (1, 1)}
    assert sorted(row["id"] for row in await registry.live()) == ["v", "y", "z"]
    assert await registry.turn([over("y"), over("v")], [asks("1"), asks("2"), asks("3")]) == [YES, YES, no("lifetime")]
    assert await redis.history() == {"x": "client", "y": "client", "v": "client"}


@pytest.mark.parametrize("key", ["worker:{}", "ostler:rows:{}", "ostler:workers", "cluster:lifetime_connections", "*"])
@on_a_loop
async def test_whatever_key_is_lost_it_is_back_before_the_next_admission(redis: RedisBackend, key: str) -> None:
    registry = await redis.node()
    await registry.announce(worker(slots=2, lifetime=3))
    assert await registry.turn([], [asks("x"), asks("y")]) == [YES, YES]
    if key == "*":
        redis.server.client.flushall()
    else:
        assert redis.server.client.delete(key.format(FIELD))
    assert await registry.turn([], [asks("z")]) == [no("full")]
    assert slots_of(redis) == ("2", "2")
    assert await registry.turn([over("x"), over("y")], [asks("z"), asks("w")]) == [YES, no("lifetime")]
    assert slots_of(redis) == ("1", "3")


@on_a_loop
async def test_a_server_that_comes_back_with_an_old_snapshot_is_corrected_before_anybody_is_admitted(
    redis: RedisBackend,
) -> None:
    registry = await redis.node()
    await registry.announce(worker(slots=3))
    assert await registry.turn([], [asks("old"), asks("older")]) == [YES, YES]
    redis.server.client.save()
    assert await registry.turn([over("old"), over("older")], [asks("a"), asks("b")]) == [YES, YES]
    redis.server.kill()
    redis.server.start()
    assert sorted(redis.server.client.hkeys(f"ostler:rows:{FIELD}")) == ["old", "older"]
    assert await registry.turn([], [asks("c"), asks("d")]) == [YES, no("full")]
    assert sorted(row["id"] for row in await registry.live()) == ["a", "b", "c"]
    assert slots_of(redis) == ("3", "5")


@on_a_loop
async def test_while_the_server_is_away_sessions_go_on_and_end_and_it_learns_of_it_later(redis: RedisBackend) -> None:
    a, b = await redis.node("a", patience=0.2), await redis.node("b", patience=0.2)
    other = WorkerKey("worker:chromium:1", 1)
    await a.announce(worker())
    await a.announce(worker(*other))
    await b.announce(worker())
    assert await a.turn([], [asks("x"), asks("y"), asks("z", other)]) == [YES, YES, YES]
    assert await b.turn([], [asks("w")]) == [YES]
    redis.server.kill()
    for refused in (a.turn([over("x")], []), a.turn([], [asks("v")]), a.beat([beat()]), a.workers(), a.end("w")):
        with pytest.raises(RegistryAway, match="does not answer"):
            await refused
    await a.leave(other, "worker-lost", "the worker died")
    assert await redis.history() == {"x": "client", "z": "worker-lost"}
    redis.server.start()
    await a.beat([beat("y", served=2)])
    await b.beat([beat("w", served=1)])
    found = {(one.node, one.worker): (one.in_use, one.served) for one in await b.workers()}
    assert found == {("a@1", WORKER): (1, 2), ("b@1", WORKER): (1, 1)}
    assert sorted(row["id"] for row in await a.live()) == ["w", "y"]


@on_a_loop
async def test_a_server_that_hangs_is_given_up_and_what_it_did_then_is_undone(redis: RedisBackend) -> None:
    registry = await redis.node(patience=0.3)
    await registry.announce(worker(slots=2))
    assert await registry.turn([], [asks("x")]) == [YES]
    redis.server.pause()
    try:
        with pytest.raises(RegistryAway):
            await registry.turn([], [asks("doubtful")])
    finally:
        redis.server.resume()
    registry._server.patience = 30.0
    assert await registry.turn([], [asks("y"), asks("z")]) == [YES, no("full")]
    assert sorted(row["id"] for row in await registry.live()) == ["x", "y"]


# ---- the reaper


@on_a_loop
async def test_a_worker_whose_heartbeats_stop_is_gone_after_its_time_and_is_reaped(redis: RedisBackend) -> None:
    a, b = await redis.node("a", registry_key_ttl=0.2), await redis.node("b")
    await a.announce(worker())
    await b.announce(worker())
    assert await a.turn([], [asks("x")]) == [YES]
    async with asyncio.timeout(30):
        while len(await b.workers()) == 2:
            await asyncio.sleep(0.02)
    assert [one.node for one in await b.workers()] == ["b@1"]
    (swept,) = await b.sweep()
    assert (swept.worker, swept.node, swept.pool, swept.sessions) == (FIELD, "a@1", "chromium", ("x",))
    assert redis.server.client.hkeys("cluster:active_connections") == ["chromium:b-1-chromium-0-1"]
    assert redis.server.client.exists(f"ostler:rows:{FIELD}") == 0


@on_a_loop
async def test_a_node_that_was_reaped_although_it_lives_is_back_with_its_sessions(redis: RedisBackend) -> None:
    a, b = await redis.node("a"), await redis.node("b")
    await a.announce(worker(slots=2))
    assert await a.turn([], [asks("x")]) == [YES]
    await redis.die("a", a)
    assert [one.sessions for one in await b.sweep()] == [("x",)]
    assert await redis.history() == {"x": "node-lost"}
    assert await a.turn([], [asks("y"), asks("z")]) == [YES, no("full")]
    await a.turn([over("x", "idle")], [])
    assert await redis.history() == {"x": "idle"}


@on_a_loop
async def test_after_trouble_of_the_server_nobody_is_reaped_until_all_had_time_to_come_back(
    redis: RedisBackend,
) -> None:
    a, b = await redis.node("a"), await redis.node("b", patience=0.1)
    await a.announce(worker())
    redis.server.client.save()
    redis.server.kill()
    with pytest.raises(RegistryAway):
        await b.workers()
    redis.server.start()
    await redis.die("a", a)
    assert await b.sweep() == []
    b._server.trouble_at = None
    assert len(await b.sweep()) == 1


@on_a_loop
async def test_a_node_that_starts_again_reaps_what_it_had_before_at_once(redis: RedisBackend) -> None:
    """Its store says that the earlier node has ended; those of other stores are left alone."""
    a, b = await redis.node("a"), await redis.node("b")
    redis.store.nodes.register(NodeRow("a@1", "a", 60_000))
    await a.announce(worker())
    await b.announce(worker())
    assert await a.turn([], [asks("x")]) == [YES]
    redis.store.nodes.end("a@1")
    again = await redis.node("again")
    assert [one.node for one in await again.workers()] == ["b@1"]
    assert await redis.history() == {"x": "node-lost"}


@on_a_loop
async def test_leftovers_of_others_in_the_counters_are_reaped(
    redis: RedisBackend, caplog: pytest.LogCaptureFixture
) -> None:
    look = redis.server.client
    look.hset("cluster:active_connections", "firefox:abc123", 3)
    look.hset("cluster:lifetime_connections", "webkit:def", 4)
    look.hset("worker:webkit:def", mapping={"status": "available", "lastHeartbeat": "1699999999"})
    registry = await redis.node()
    assert sorted(one.worker for one in await registry.sweep()) == ["firefox:abc123", "webkit:def"]
    assert "reaped stale worker webkit:def" in caplog.text
    assert look.keys("*") == []


# ---- the start, and settings


@on_a_loop
async def test_a_node_tries_several_times_to_reach_the_server(
    redis: RedisBackend, caplog: pytest.LogCaptureFixture
) -> None:
    redis.server.kill()
    with pytest.raises(ConfigError, match=r"could not be reached in 2 attempts"):
        await redis.node("b", registry_attempts=2)
    assert caplog.text.count("does not answer (attempt") == 2
    start = asyncio.ensure_future(redis.node("c", registry_attempts=1000, registry_delay=0.05))
    while "attempt 3" not in caplog.text:
        await asyncio.sleep(0.01)
    redis.server.start()
    assert isinstance(await start, RedisRegistry)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fake(name: str, *args, **more):
        if name.startswith("redis"):
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", fake)
    with pytest.raises(ConfigError, match=r"pip install .*\[redis\]'"):
        redis_server.client("redis://user:secret@host:6379/0", 1.0)


def test_an_address_that_is_none_of_redis_is_refused() -> None:
    for url in ("http://user:secret@host", "nonsense"):
        with pytest.raises(ConfigError, match="cannot be used: Redis URL must") as error:
            redis_server.client(url, 1.0)
        assert "secret" not in str(error.value)


def test_a_password_is_never_shown() -> None:
    assert redis_server.shown("redis://me:secret@cache:6379/2") == "redis://cache:6379/2"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"heartbeat_interval": 30.0, "stale_after": 90, "node_lease": 90}, "heartbeat_interval (30 s) must be less than registry_key_ttl (30 s)"),
        ({"registry_command_ttl": 20.0}, "registry_key_ttl (30 s) must be less than registry_command_ttl (20 s)"),
        ({"registry_command_ttl": 4.0}, "heartbeat_interval (5 s) must be less than registry_command_ttl (4 s)"),
        ({"registry_sweep": 30.0}, "registry_key_ttl (30 s) must be less than registry_sweep (30 s)"),
        ({"registry_attempts": 0}, "registry_attempts must be at least 1, found 0"),
    ],
)  # fmt: skip
def test_times_that_cannot_work_together_are_refused_with_both_numbers(given: dict, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        config.load({"registry": "redis://host", **given}, environ={})
    assert said in str(error.value)
    config.load(given, environ={})  # without Redis they do not matter


@on_a_loop
async def test_turns_that_were_given_up_leave_nothing_behind(redis: RedisBackend) -> None:
    registry = await redis.node()
    await registry.announce(worker(slots=4, lifetime=0))
    for n in range(20):
        if not await given_up(registry.turn([], [asks(f"d{n}"), asks(f"e{n}")]), steps=1 + n):
            await registry.turn([over(f"d{n}"), over(f"e{n}")], [])
        assert await registry.turn([], [asks(f"s{n}")]) == [YES]
        assert [row["id"] for row in await registry.live()] == [f"s{n}"]
        await given_up(registry.turn([over(f"s{n}")], []), steps=1 + n)
    await registry.beat([beat()])
    assert slots_of(redis)[0] == "0"
