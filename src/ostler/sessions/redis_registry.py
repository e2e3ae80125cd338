"""The registry of sessions in Redis or Valkey: one server for many nodes and gateways, with keys that can be read with redis-cli.

lua/common.lua lists the keys. Every step is one script, so it happens as a whole or not at all. A worker's node numbers its writes, and
each script first compares: where the server has not what the node wrote last (it was restarted or flushed, a key has expired, an
answer was lost), nothing is done but that the node writes the worker and its live sessions anew, and asks again. So a server
that forgot everything admits nobody too many. Sessions themselves need no server: they go on while it is away.

The history of ended sessions is in the store, as always.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ostler.config import Settings
from ostler.errors import RegistryAway
from ostler.sessions.redis_server import AGAIN, RedisServer, errors
from ostler.sessions.registry import (
    AVAILABLE,
    DRAIN,
    PATIENCE,
    SERVE,
    Admission,
    Beat,
    Ended,
    Memory,
    Registered,
    SessionRow,
    Swept,
    Verdict,
    WorkerEntry,
    WorkerKey,
    tell_swept,
)
from ostler.store.identity import LIVE, name_of
from ostler.store.lanes import Lane
from ostler.store.sessions import NODE_LOST
from ostler.store.store import Store, now_ms

log = logging.getLogger("ostler.sessions")

_LISTED = 1000  # live sessions that are listed at most
_LOOK = 1.0  # seconds between two looks for commands that somebody set by hand
_TRIES = 5  # of a turn that finds the server without what it should have
_STALE = "stale"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class _Own:
    """A worker of this node as the server should have it."""

    def __init__(self, entry: WorkerEntry, node: str) -> None:
        self.id = worker_id(node, entry)
        self.field = f"{_safe(entry.serves)}:{self.id}"
        self.turn = ""  # the number of what it was written with; '': nobody knows, so it is written anew
        self.sessions: set[str] = set()  # that the server has
        self.wanted = SERVE
        self.started_at = now_ms()


class RedisRegistry:
    """See Registry. `lane` writes the history; `url` is how others reach this node."""

    def __init__(
        self,
        settings: Settings,
        lane: Lane,
        node: Callable[[], str],
        url: str | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self._settings, self._lane, self._node, self._url = settings, lane, node, url
        self.rung: Callable[[], None] = lambda: None
        self.sweep_every = settings.registry_sweep
        self._memory = Memory()
        self._own: dict[WorkerKey, _Own] = {}
        self._left: dict[str, str] = {}  # workers that are gone and the server was not told of: field and id
        self._numbers = itertools.count(1)
        self._order = asyncio.Lock()
        self._patient_until = 0.0
        self._listener: asyncio.Task[None] | None = None
        self._server = RedisServer(settings.registry, patience)
        self._ttl = int(settings.registry_key_ttl * 1000)

    # ---- start and stop

    async def start(self) -> None:
        """Reach the server, in several attempts; raises ConfigError when none succeeds."""
        await self._server.reach(self._settings.registry_attempts, self._settings.registry_delay)
        self._patient_until = time.monotonic() + self._settings.registry_key_ttl
        if ended := await self._lane.call(_ended_nodes, patience=self._server.patience):
            await self._reap(-1, ended)  # what this node had in earlier lives need not wait for its keys to expire
        self._listener = asyncio.get_running_loop().create_task(self._listen(), name="registry's bell")

    async def stop(self) -> None:
        """Tell what is still to be told, and hang up."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.cancel()
            await asyncio.gather(listener, return_exceptions=True)
        try:
            async with self._order:
                if self._memory.owed:
                    await self._turn([])
                await self._tell_left()
        except RegistryAway as error:
            log.warning("%s; other nodes find out by the time to live of its keys", error)
        await self._server.close()

    # ---- this node's workers and sessions

    async def announce(self, worker: WorkerEntry) -> None:
        self._memory.announced(worker)
        if worker.worker not in self._own:
            self._own[worker.worker] = _Own(worker, self._node())
        async with self._order:
            await self._restore([worker.worker])

    async def turn(self, ended: Sequence[Ended], wanted: Sequence[Admission]) -> list[Verdict]:
        self._record(self._memory.ended(ended))
        async with self._order:
            return await self._turn(wanted)

    async def beat(self, workers: Sequence[Beat]) -> dict[WorkerKey, str]:
        async with self._order:
            moved = {row.id: row for row in self._memory.beaten(workers)}
            if self._memory.owed:
                await self._turn([])
            await self._tell_left()
            owns = dict(self._own)
            batch = [self._beat_of(key, own, moved) for key, own in owns.items()]
            said = await self._server.ask("beat", workers=batch, ttl=self._ttl) if batch else []
            words = dict(zip(owns, said, strict=True))
            for key, own in owns.items():
                own.wanted = own.wanted if words[key] == _STALE else words[key]
            await self._restore([key for key, word in words.items() if word == _STALE and key in self._own])
        return {beat.worker: owns[beat.worker].wanted if beat.worker in owns else SERVE for beat in workers}

    async def leave(self, worker: WorkerKey, reason: str, text: str) -> None:
        self._record(self._memory.left(worker, reason, text))
        own = self._own.pop(worker, None)
        if own is None:
            return
        self._left[own.field] = own.id
        try:
            async with self._order:
                await self._tell_left()
        except RegistryAway as error:
            log.warning("worker %s is gone, and is unregistered later: %s", own.field, error)

    async def orders(self) -> list[str]:
        key = f"ostler:orders:{self._node()}"
        asked = [str(one) for one in await self._server.insist(lambda: self._server.redis.smembers(key))]
        if over := [one for one in asked if one not in self._memory.live]:
            await self._server.insist(lambda: self._server.redis.srem(key, *over))
        return [one for one in asked if one in self._memory.live]

    async def secret(self, own: str) -> str:
        """The first node's that asks: nodes of one registry may have stores of their own."""
        await self._server.insist(lambda: self._server.redis.set("ostler:secret", own, nx=True))
        return str(await self._server.insist(lambda: self._server.redis.get("ostler:secret")) or own)

    async def _turn(self, wanted: Sequence[Admission]) -> list[Verdict]:
        """Under the lock. Ends that are owed, then admissions; restored first, as often as the server turns out to have lost something."""
        for _ in range(_TRIES):
            known = [about for about in wanted if about.worker in self._own and not self._is_taken(about)]
            ends = self._ends()
            workers = {about.worker for about in known} | {key for _, key in ends}
            if lost := [key for key in workers if not self._own[key].turn]:
                await self._restore(lost)
                continue
            if not workers:
                break
            if (verdicts := await self._try(workers, ends, known)) is None:
                continue
            said = dict(zip((about.id for about in known), verdicts, strict=True))
            found = [_verdict(said.get(about.id) or self._refusal(about)) for about in wanted]
            self._memory.admitted(self._node(), wanted, found)
            return found
        else:
            raise RegistryAway(
                f"the registry {self._server.name} loses what it is told: is it shared with others who delete keys?"
            )
        self._memory.told([*self._memory.owed.values()])
        return [_verdict(self._refusal(about)) for about in wanted]

    def _is_taken(self, about: Admission) -> bool:
        """Whether another session, on another worker of this node, has the id."""
        row = self._memory.live.get(about.id)
        return row is not None and (row.component, row.generation) != about.worker

    def _refusal(self, about: Admission) -> str:
        return "taken" if self._is_taken(about) else "unknown"

    def _ends(self) -> list[tuple[str, WorkerKey]]:
        """Sessions that are over and that the server still has."""
        owed = self._memory.owed
        return [(id_, key) for key, own in self._own.items() for id_ in own.sessions & owed.keys()] if owed else []

    async def _try(
        self, workers: Iterable[WorkerKey], ends: Sequence[tuple[str, WorkerKey]], asked: Sequence[Admission]
    ) -> list[str] | None:
        """One turn of these workers; None when the server has not what it should have."""
        number, own = str(next(self._numbers)), {key: self._own[key] for key in workers}
        owed, served = [*self._memory.owed.values()], {key: self._memory.workers[key].served for key in workers}
        known = [[one.field, one.turn, number, len(one.sessions), served[key]] for key, one in own.items()]
        ended = [[id_, own[key].field] for id_, key in ends]
        begun = {about.id: SessionRow.begun(self._node(), about, now_ms()) for about in asked}
        rows = [[a.id, own[a.worker].field, own[a.worker].id, _text(begun[a.id])] for a in asked]
        for one in own.values():
            one.turn = ""  # until there is an answer
        stale, verdicts = await self._server.ask("turn", known=known, ended=ended, asked=rows)
        if stale:
            return None
        for one in own.values():
            one.turn = number
        for id_, key in ends:
            own[key].sessions.discard(id_)
        for about, verdict in zip(asked, verdicts, strict=True):
            if verdict == "ok":
                own[about.worker].sessions.add(about.id)
        self._memory.told(owed)
        return list(verdicts)

    async def _restore(self, keys: Sequence[WorkerKey]) -> None:
        """Under the lock: write these workers and all that they have, whatever the server has."""
        if not keys:
            return
        number, own = str(next(self._numbers)), {key: self._own[key] for key in keys}
        live = {key: {row.id: row for row in self._memory.of(key)} for key in keys}
        batch = [self._whole(key, number, live[key]) for key in keys]
        for one in own.values():
            one.turn = ""
        said = await self._server.ask("restore", workers=batch, ttl=self._ttl)
        for (key, one), (wanted, served) in zip(own.items(), said, strict=True):
            one.turn, one.sessions, one.wanted = number, set(live[key]), wanted
            self._memory.counted(key, int(served))

    def _whole(self, key: WorkerKey, number: str, live: dict[str, SessionRow]) -> list[Any]:
        own, entry, node = self._own[key], self._memory.workers[key], self._node()
        told = {
            "browserType": entry.serves,
            "wsEndpoint": _endpoint(self._url, entry),
            "status": entry.status,
            "node": node,
            "name": name_of(node) or node,
            "url": self._url or "",
            "pool": entry.pool,
            "component": entry.component,
            "generation": entry.generation,
            "address": entry.address,
            "slots": entry.slots,
            "lifetime": entry.lifetime,
            "versions": json.dumps(entry.versions),
            "startedAt": own.started_at,
            "turn": number,
        }
        rows = [text for row in live.values() for text in (row.id, _text(row))]
        about = json.dumps([node, entry.pool, entry.component, entry.generation])
        pairs = [str(text) for pair in told.items() for text in pair]
        return [own.field, own.id, pairs, rows, entry.served, own.wanted, about]

    def _beat_of(self, key: WorkerKey, own: _Own, moved: dict[str, SessionRow]) -> list[Any]:
        entry = self._memory.workers[key]
        rows = [text for id_ in own.sessions & moved.keys() for text in (id_, _text(moved[id_]))]
        return [own.field, own.id, own.turn, len(own.sessions), entry.served, entry.status, rows]

    async def _tell_left(self) -> None:
        if left := [*self._left.items()]:
            await self._server.ask("leave", workers=left)
            for field, _ in left:
                self._left.pop(field, None)

    def _record(self, rows: Sequence[SessionRow]) -> None:
        """History: sessions that are over."""
        if rows:
            self._lane.post(lambda store: store.sessions.add(rows))

    # ---- all nodes

    async def workers(self) -> list[Registered]:
        found = [_registered(*one) for one in await self._server.ask("list")]
        return sorted(found, key=lambda one: (one.node, one.component, one.generation))

    async def live(self) -> list[dict[str, Any]]:
        rows = [_row(text) for text in await self._server.ask("live", most=_LISTED)]
        return [row._asdict() for row in sorted(rows, key=lambda row: (row.started_at, row.id), reverse=True)]

    async def sweep(self) -> list[Swept]:
        """The reaper. After trouble of the server nobody is reaped for a while: others must have time to come back to it, too."""
        if time.monotonic() < max(
            self._patient_until, (self._server.trouble_at or 0.0) + self._settings.registry_key_ttl
        ):
            return []
        return await self._reap(self._settings.registry_key_ttl, [])

    async def _reap(self, stale: float, dead: Sequence[str]) -> list[Swept]:
        found = []
        for field, about, silent, texts in await self._server.ask("sweep", stale=stale, dead=dead):
            rows = [_row(text) for text in texts]
            node, pool, *_ = json.loads(about) if about else ("unknown", field.partition(":")[0])
            reason, text = NODE_LOST
            at = now_ms()
            self._record([row.over(Ended(row.id, reason, text, None, row.bytes_in, row.bytes_out), at) for row in rows])
            seconds = float(silent) if silent >= 0 else self._settings.registry_key_ttl
            found.append(Swept(field, node, pool, seconds, tuple(row.id for row in rows)))
            tell_swept(found[-1])
        return found

    async def end(self, session: str) -> bool:
        return bool(await self._server.ask("end", session=session))

    async def want(self, worker: Registered, state: str) -> bool:
        id_ = worker_id(worker.node, worker)
        return bool(
            await self._server.ask(
                "want",
                field=f"{_safe(worker.serves)}:{id_}",
                id=id_,
                wanted=state,
                ttl=int(self._settings.registry_command_ttl * 1000),
            )
        )

    # ---- the server

    async def _listen(self) -> None:
        """Wait for the bell of this node, and look for commands that were set by hand in between."""
        while True:
            try:
                async with asyncio.timeout(_LOOK + self._server.patience):
                    rang = await self._server.redis.blpop([f"ostler:bell:{self._node()}"], timeout=_LOOK)
                    keys = [f"worker:cmd:{own.id}" for own in self._own.values() if own.wanted != DRAIN]
                    asked = bool(rang) or (bool(keys) and "shutdown" in await self._server.redis.mget(keys))
                if asked:
                    self.rung()
                    await asyncio.sleep(AGAIN)  # until it is obeyed it is found again
            except errors() as error:
                self._server.is_away(error)
                await asyncio.sleep(_LOOK)
            except Exception:
                log.exception("listening to the registry failed once; it goes on")
                await asyncio.sleep(_LOOK)


def _ended_nodes(store: Store) -> list[str]:
    return [node["id"] for node in store.nodes.all() if node["status"] not in LIVE]


def worker_id(node: str, worker: WorkerEntry | Registered) -> str:
    """A worker's id in keys: name and start of its node, pool, number and generation, such as `web1-3fa9c2-chromium-0-7`."""
    name, _, start = node.rpartition("@")
    number = worker.component.rpartition(":")[2]
    return _safe(f"{name}-{start[:6]}-{worker.pool}-{number}-{worker.generation}")


def _safe(text: str) -> str:
    return _UNSAFE.sub("-", text)


def _endpoint(url: str | None, entry: WorkerEntry) -> str:
    """Where clients connect: the node's relay, or, where the node has no address for others, the worker's own."""
    return f"ws{url.removeprefix('http')}/sessions/{entry.serves}" if url else entry.address


def _text(row: SessionRow) -> str:
    return json.dumps(row._asdict())


def _row(text: str) -> SessionRow:
    """A row that a node wrote, perhaps one of another version."""
    told = json.loads(text)
    return SessionRow(**{name: told.get(name) for name in SessionRow._fields})


def _verdict(word: str) -> Verdict:
    return Verdict(ok=True) if word == "ok" else Verdict(ok=False, why=word)


def _registered(flat: Sequence[str], in_use: int, served: str | None) -> Registered:
    has = dict(zip(flat[::2], flat[1::2], strict=True))
    return Registered(
        node=has["node"],
        name=has["name"],
        url=has["url"] or None,
        pool=has["pool"],
        serves=has["browserType"],
        component=has["component"],
        generation=int(has["generation"]),
        address=has["address"],
        slots=int(has["slots"]),
        lifetime=int(has["lifetime"]),
        served=int(served or 0),
        in_use=in_use,
        status=has.get("status", AVAILABLE),
        wanted=has.get("wanted", SERVE),
        versions=tuple(json.loads(has["versions"])),
        started_at=int(has["startedAt"]),
        beat_at=int(has["lastHeartbeat"]) * 1000,
    )
