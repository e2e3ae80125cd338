"""What the lifecycle tells of session workers, what they say themselves, and what follows for their sessions."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ostler.events import WorkerBroken, WorkerDrained
from ostler.lifecycle import ends
from ostler.lifecycle.process import Ended
from ostler.lifecycle.state import Status
from ostler.lifecycle.wire import Frame
from ostler.lifecycle.worker import Doing, Exit, Left, Nothing, Worker
from ostler.sessions.held import Live, Serving

if TYPE_CHECKING:
    from ostler.sessions.pools import SessionPools

_SAY_ENDED = 2.0  # seconds in which the plane says how the sessions of a dead worker ended


class Sessions(Nothing):
    """The tenant of session pools."""

    kind = "sessions"

    def __init__(self, pools: SessionPools) -> None:
        self._pools = pools

    def ready(self, worker: Worker, info: Mapping[str, Any]) -> None:
        pools, spec = self._pools, self._pools.specs[worker.pool.spec.name]
        about = dict(worker.info)
        if (address := pools.address(worker, spec)) is not None:
            about |= {"address": address, "path": spec.path}
        serving = Serving(worker, spec, about)
        pools.workers[serving.key] = serving
        pools.supervisor.spawn_task(pools.announce(serving), f"announce {worker.component}")

    def heard(self, worker: Worker, frame: Frame) -> None:
        """What a worker says. It speaks of its own sessions alone, and what it says fits everywhere."""
        serving = self._pools.of(worker)
        if serving is None:
            return
        match frame:
            case ["opened", str(session), dict(endpoint)]:
                if live := self._own(serving, session):
                    live.is_open, live.opened = (
                        True,
                        {k: str(v) for k, v in endpoint.items() if k in ("address", "path")},
                    )
                    # From now on it waits for the registry alone, and the plane knows for how long.
                    self._pools.stop_clock(live)
                    self._pools.ready(live)
            case ["unopened", str(session), str(text)]:
                if live := self._own(serving, session):
                    self._pools.refuse(live, "worker", f"the worker could not open it: {plain(text)}")
            case ["ended", str(session), str(text)]:
                if live := self._own(serving, session):
                    self._pools.say("kill", live.id, "worker-lost", f"ostler: {plain(text)}")
            case ["began", str(session)]:
                if live := self._own(serving, session):
                    self._pools.say("began", live.id)
            case ["over", str(session), str(reason), dict(about)]:
                if live := self._own(serving, session):
                    self._pools.say("over", live.id, plain(reason), _sums(about))
            case ["hung" | "lost" as what, str(text)]:
                self._broken(serving, what, plain(text))

    def _own(self, serving: Serving, session: str) -> Live | None:
        return self._pools.held.get(session) if session in serving.live else None

    def _broken(self, serving: Serving, what: str, text: str) -> None:
        """What it serves is dead or does not answer: its clients are told, and it is replaced."""
        if serving.gone is not None:
            return
        self._pools.bus.send(
            WorkerBroken(serving.worker.component, serving.spec.serves, what, text[:200], len(serving.live))
        )
        said = f"the worker hangs: {text}" if what == "hung" else text
        serving.closing, serving.gone = True, (f"worker-{what}", f"ostler: {said}")
        self._pools.say("down", *serving.key, *serving.gone)
        self._pools.supervisor.kill(serving.worker, what)

    def beat(self, worker: Worker, facts: Any) -> Any:
        serving = self._pools.of(worker)
        if serving is None or not isinstance(facts, dict):
            return
        probe_ms, mb = facts.get("probe_ms"), facts.get("pss_mb")
        serving.probe_ms = float(probe_ms) if isinstance(probe_ms, (int, float)) else None
        if isinstance(mb, (int, float)):
            serving.mb = worker.rss_mb = float(mb)
        for session, (bytes_in, bytes_out, idle) in facts.get("door", {}).items():
            if live := self._own(serving, session):
                live.bytes_in, live.bytes_out, live.idle = _count(bytes_in), _count(bytes_out), float(idle)

    def busy(self, worker: Worker) -> bool:
        serving = self._pools.of(worker)
        return bool(serving is not None and serving.live)

    def doing(self, worker: Worker) -> Doing | None:
        serving = self._pools.of(worker)
        return Doing("", f"{len(serving.live)} sessions") if serving and serving.live else None

    def drain(self, worker: Worker) -> None:
        """The worker leaves: no new sessions; those that it has get `drain` seconds."""
        serving = self._pools.of(worker)
        if serving is None or serving.draining_since is not None:
            return
        serving.closing, serving.draining_since = True, time.monotonic()
        self._pools.say("close", *serving.key, self._pools.supervisor.stopping)
        loop = asyncio.get_running_loop()
        serving.cutting = loop.call_later(serving.spec.options.drain, self._cut, serving)
        self._pools.touched()

    def _cut(self, serving: Serving) -> None:
        if not serving.live or serving.gone:
            return
        limit, serving.cut = serving.spec.options.drain, len(serving.live)
        self._pools.say(
            "cut", *serving.key, "drained", f"ostler: the worker leaves, and its drain limit of {limit:g} s is over"
        )

    def died(self, worker: Worker, ended: Ended) -> None:
        """Its process has exited: its clients are told at once."""
        serving = self._pools.of(worker)
        if serving is None or serving.gone is not None:
            return
        asked = worker.status is Status.STOPPING or (worker.on_purpose and worker.killing != "killed")
        words = ends.words(worker.killing or ("signal" if ended.signal else "exit"), ended.code, ended.signal)
        serving.gone = (
            "shutdown" if asked else "worker-lost",
            f"ostler: the worker {'has stopped' if asked else f'died ({words})'}",
        )
        serving.closing = True
        self._pools.say("down", *serving.key, *serving.gone)

    def gone(self, worker: Worker, end: Exit) -> Left:
        self._pools.removed(worker)
        serving = self._pools.of(worker)
        if serving is None:
            return Left()
        if serving.cutting is not None:
            serving.cutting.cancel()
        if serving.draining_since is not None:
            took = time.monotonic() - serving.draining_since
            self._pools.bus.send(WorkerDrained(worker.component, serving.spec.serves, took, serving.cut))
        serving.buried = True
        had = bool(serving.live) or worker.served > 0
        if serving.live and self._pools.has_plane:
            # The plane knows how many bytes went; it says so in a moment.
            asyncio.get_running_loop().call_later(_SAY_ENDED, self._pools.unregister, serving)
        else:
            self._pools.unregister(serving)
        self._pools.touched()
        # A worker that serves and dies had sessions in hand: what clients do in them does not stop a pool.
        crashed = end.kind == "crash" and had
        return Left(f"sessions:{worker.component}:{worker.generation}" if crashed else None)


def plain(text: str) -> str:
    """A text of a worker, as a close frame and every store can take it: not long, and without halves of characters."""
    return text[:500].encode(errors="replace").decode()


def _count(value: object) -> int:
    """A number of bytes, as every store can take it."""
    return min(max(0, value), 2**62) if isinstance(value, int) else 0


def _sums(about: Mapping[str, Any]) -> dict[str, Any]:
    """What a worker says of a session that has ended at its door."""
    code = about.get("code")
    return {
        "text": plain(str(about.get("text") or "")),
        "code": code if isinstance(code, int) and 0 <= code < 65_536 else 0,
        "bytes_in": _count(about.get("bytes_in")),
        "bytes_out": _count(about.get("bytes_out")),
    }
