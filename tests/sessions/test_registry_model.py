"""A registry against a plain model: whatever is done to it, in any order, it admits as many as the model, and never one too many."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ostler.sessions.registry import Registry, Verdict, WorkerKey
from tests.sessions.registries import (
    YES,
    Backend,
    asks,
    backend,
    beat,
    given_up,
    no,
    on_a_loop,
    over,
    redis,
    server,
    shared_database,
    worker,
)

assert backend and redis and server and shared_database  # fixtures


class Worker:
    """What a worker of the model has."""

    def __init__(self, slots: int, lifetime: int) -> None:
        self.slots, self.lifetime, self.served = slots, lifetime, 0
        self.live: set[str] = set()
        self.is_draining = False

    def admit(self, session: str) -> Verdict:
        if session in self.live:
            return YES
        if self.is_draining:
            return no("draining")
        if self.lifetime and self.served >= self.lifetime:
            return no("lifetime")
        if len(self.live) >= self.slots:
            return no("full")
        self.live.add(session)
        self.served += 1
        return YES


class Node:
    """One node: its registry, and what the model says that it has."""

    def __init__(self, name: str, registry: Registry) -> None:
        self.name, self.registry = name, registry
        self.workers: dict[WorkerKey, Worker] = {}
        self.generation = 0

    async def beat(self) -> None:
        status = {True: "draining", False: "available"}
        beats = [
            beat(*w.live, worker=key, status=status[w.is_draining], served=w.served) for key, w in self.workers.items()
        ]
        wanted = await self.registry.beat(beats)
        assert wanted.keys() == self.workers.keys()

    def some(self, dice: random.Random) -> WorkerKey:
        """A worker of the node, seldom one that it has no more."""
        gone = WorkerKey(f"worker:chromium:{dice.randrange(4)}", dice.randrange(1, self.generation + 2))
        return gone if not self.workers or dice.random() < 0.05 else dice.choice([*self.workers])


class Walk:
    """Random steps on two nodes of one registry, each of which the model takes, too."""

    def __init__(self, seed: int, backend: Backend, nodes: list[Node]) -> None:
        self.dice, self.backend, self.nodes = random.Random(seed), backend, nodes
        self.done: Counter[str] = Counter()
        self.sessions = 0

    async def step(self) -> None:
        node = self.dice.choice(self.nodes)
        kinds = {"turn": 60, "doubt": 4, "beat": 8, "announce": 4, "leave": 2, "drain": 2, "forget": 3}
        (kind,) = self.dice.choices([*kinds], [*kinds.values()])
        await getattr(self, kind)(node)
        self.done[kind] += 1

    async def turn(self, node: Node) -> None:
        ended, wanted = self._ended(node), self._wanted(node)
        found = await node.registry.turn([over(id) for id in ended], [asks(id, key) for id, key in wanted])
        self._end(node, ended)
        expected = [node.workers[key].admit(id) if key in node.workers else no("unknown") for id, key in wanted]
        assert found == expected

    async def doubt(self, node: Node) -> None:
        """A turn without an answer, and the heartbeat after it."""
        ended, wanted = self._ended(node), self._wanted(node)
        given = node.registry.turn([over(id) for id in ended], [asks(id, key) for id, key in wanted])
        lost = await given_up(given, steps=self.dice.randrange(1, 12))
        self._end(node, ended)
        if not lost:
            for id, key in wanted:
                if key in node.workers:
                    node.workers[key].admit(id)
        else:
            await node.beat()
            await self._recount(node, Counter(key for _, key in wanted))

    async def _recount(self, node: Node, asked: Counter[WorkerKey]) -> None:
        """Sessions whose turn was given up may have been counted, as far as there was room."""
        for one in await node.registry.workers():
            if one.node == f"{node.name}@1":
                w = node.workers[one.worker]
                assert w.served <= one.served <= w.served + asked[one.worker]
                w.served = one.served

    async def beat(self, node: Node) -> None:
        await node.beat()

    async def announce(self, node: Node) -> None:
        if len(node.workers) < 4:
            node.generation += 1
            key = WorkerKey(f"worker:chromium:{self.dice.randrange(4)}", node.generation)
            slots, lifetime = self.dice.randrange(1, 6), self.dice.choice([0, 5, 50])
            await node.registry.announce(worker(*key, slots=slots, lifetime=lifetime))
            node.workers[key] = Worker(slots, lifetime)

    async def leave(self, node: Node) -> None:
        key = node.some(self.dice)
        await node.registry.leave(key, "drained", "")
        node.workers.pop(key, None)

    async def drain(self, node: Node) -> None:
        """Another node wants it; the node is told."""
        found = {one.worker: one for one in await self.nodes[0].registry.workers() if one.node == f"{node.name}@1"}
        key = node.some(self.dice)
        if key in found and key in node.workers:
            assert await self.dice.choice(self.nodes).registry.want(found[key], "drain")
            node.workers[key].is_draining = True
            await node.beat()

    async def forget(self, node: Node) -> None:
        """The server has lost something."""
        if self.backend.name != "redis":
            return
        look = self.backend.server.client
        keys = look.keys("*")
        chosen = self.dice.choice([None, *keys]) if keys else None
        look.flushall() if chosen is None else look.delete(chosen)

    async def check(self) -> None:
        """After a heartbeat of all, everybody sees what the model has."""
        for node in self.nodes:
            await node.beat()
        found = {(one.node, one.worker): one for one in await self.dice.choice(self.nodes).registry.workers()}
        expected = {(f"{node.name}@1", key): w for node in self.nodes for key, w in node.workers.items()}
        assert found.keys() == expected.keys()
        for key, one in found.items():
            w = expected[key]
            assert (one.in_use, one.served) == (len(w.live), w.served)
            assert one.in_use <= one.slots and (not one.lifetime or one.served <= one.lifetime)
        live = {row["id"] for row in await self.nodes[0].registry.live()}
        assert live == {id for w in expected.values() for id in w.live}

    def _ended(self, node: Node) -> list[str]:
        live = sorted(id for w in node.workers.values() for id in w.live)
        return self.dice.sample(live, min(len(live), self.dice.randrange(4))) + (
            ["nobody"] if self.dice.random() < 0.05 else []
        )

    def _wanted(self, node: Node) -> list[tuple[str, WorkerKey]]:
        found = []
        for _ in range(self.dice.randrange(4)):
            self.sessions += 1
            found.append((f"s{self.sessions}", node.some(self.dice)))
        return found

    def _end(self, node: Node, ended: list[str]) -> None:
        for w in node.workers.values():
            w.live -= set(ended)


async def walk(backend: Backend, seed: int, steps: int) -> Counter[str]:
    nodes = [Node(name, await backend.node(name)) for name in ("a", "b")]
    taken = Walk(seed, backend, nodes)
    for n in range(steps):
        await taken.step()
        if n % 20 == 19:
            await backend.settled()
            await taken.check()
    return taken.done


@on_a_loop
async def test_random_steps_agree_with_a_plain_model(backend: Backend) -> None:
    done = await walk(backend, 7, 1500)
    assert all(done.values()) and done["turn"] > 500


@pytest.mark.soak
@pytest.mark.timeout(1800)
@on_a_loop
async def test_a_hundred_thousand_random_steps_agree_with_a_plain_model(backend: Backend) -> None:
    await walk(backend, 11, 100_000)
