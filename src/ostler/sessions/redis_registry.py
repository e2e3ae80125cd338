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
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ostler.config import Settings
from ostler.errors import RegistryAway
from ostler.parts import Tasks
from ostler.sessions.redis_rows import Own, field_of, packed, registered, unpacked, worker_id
from ostler.sessions.redis_server import AGAIN, RedisServer, errors
from ostler.sessions.registry import (
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
from ostler.store.identity import LIVE
from ostler.store.lanes import Lane
from ostler.store.sessions import NODE_LOST
from ostler.store.store import Store, now_ms

log = logging.getLogger("ostler.sessions")

_LISTED = 1000  # live sessions that are listed at most
_LOOK = 1.0  # seconds between two looks for commands that somebody set by hand
_TRIES = 5  # of a turn that finds the server without what it should have
_STALE = "stale"


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
        self._own: dict[WorkerKey, Own] = {}
        self._left: dict[str, str] = {}  # workers that are gone and the server was not told of: field and id
        self._numbers = itertools.count(1)
        self._order = asyncio.Lock()
        self._patient_until = 0.0
        self._tasks = Tasks()
        self._server = RedisServer(settings.registry, patience)
        self._ttl = int(settings.registry_key_ttl * 1000)

    # ---- start and stop

    async def start(self) -> None:
        """Reach the server, in several attempts; raises ConfigError when none succeeds."""
        await self._server.reach(self._settings.registry_attempts, self._settings.registry_delay)
        self._patient_until = time.monotonic() + self._settings.registry_key_ttl
        if ended := await self._lane.call(_ended_nodes, patience=self._server.patience):
            await self._reap(-1, ended)  # what this node had in earlier lives need not wait for its keys to expire
        self._tasks.begin(self._listen(), "registry's bell")

    async def stop(self) -> None:
        """Tell what is still to be told, and hang up."""
        await self._tasks.stop()
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
            self._own[worker.worker] = Own(worker, self._node())
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
            batch = [own.beat(self._memory.workers[key], moved) for key, own in owns.items()]
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
        rows = [[a.id, own[a.worker].field, own[a.worker].id, packed(begun[a.id])] for a in asked]
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
        batch = [
            one.whole(self._memory.workers[key], self._node(), self._url or "", number, live[key].values())
            for key, one in own.items()
        ]
        for one in own.values():
            one.turn = ""
        said = await self._server.ask("restore", workers=batch, ttl=self._ttl)
        for (key, one), (wanted, served) in zip(own.items(), said, strict=True):
            one.turn, one.sessions, one.wanted = number, set(live[key]), wanted
            self._memory.counted(key, int(served))

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
        found = [registered(*one) for one in await self._server.ask("list")]
        return sorted(found, key=lambda one: (one.node, one.component, one.generation))

    async def live(self) -> list[dict[str, Any]]:
        rows = [unpacked(text) for text in await self._server.ask("live", most=_LISTED)]
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
            rows = [unpacked(text) for text in texts]
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
        id_, ttl = worker_id(worker.node, worker), int(self._settings.registry_command_ttl * 1000)
        field = field_of(worker.serves, id_)
        return bool(await self._server.ask("want", field=field, id=id_, wanted=state, ttl=ttl))

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


def _verdict(word: str) -> Verdict:
    return Verdict(ok=True) if word == "ok" else Verdict(ok=False, why=word)
