"""The node's side of sessions: the tenant of session pools, and the go-between of their workers, the data plane and the registry.

The plane chooses the worker and holds the slot; it asks `admit`, and connects its client when the registry has the row and, where the worker
opens each session itself, the worker has opened it. The frames are listed in docs/architecture.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ostler.errors import OstlerError
from ostler.events import Bus, PoolPaused, SessionBegan, SessionEnded, SessionsTouched
from ostler.lifecycle.wire import Frame
from ostler.lifecycle.worker import Worker
from ostler.parts import Tasks
from ostler.sessions import figures
from ostler.sessions.held import Counts, Live, Serving
from ostler.sessions.registry import DRAIN, Beat, Ended, Registry, Verdict, WorkerKey
from ostler.sessions.spec import SessionSpec
from ostler.sessions.tenant import plain
from ostler.sessions.turns import Turns
from ostler.store import now_ms

if TYPE_CHECKING:
    from ostler.lifecycle.supervisor import Supervisor
    from ostler.sessions.neighbours import Neighbours

log = logging.getLogger("ostler.sessions")

_OPENS = 10.0  # seconds in which a worker opens a session
_AGAIN = 0.1  # seconds after which a session that the registry did not admit is tried once more


class SessionPools:
    """All session pools of the node. A part of it: `start` begins the turns with the registry. `supervisor` is set by the runtime."""

    def __init__(self, specs: Mapping[str, SessionSpec], registry: Registry, bus: Bus, *, beat: float) -> None:
        self.specs, self.registry, self.bus, self._every = dict(specs), registry, bus, beat
        self.supervisor: Supervisor
        self.neighbours: Neighbours | None = None
        self.removed: Callable[[Worker], None] = lambda _: None  # a worker and its family are gone
        self.address: Callable[[Worker, SessionSpec], str | None] = lambda _, __: None  # of programs
        self._send: Callable[..., None] | None = None  # to the plane
        self.workers: dict[WorkerKey, Serving] = {}
        self.held: dict[str, Live] = {}
        self.first_in_line: dict[str, list[Any]] = {}
        self.waiting: dict[str, int] = {}
        self._counts: dict[str, Counts] = {}
        self._turns = Turns(registry, self._judged, self.refuse)
        self._hurry = asyncio.Event()
        self._tasks = Tasks()

    async def start(self) -> None:
        await self.registry.start()
        self.registry.rung = self.look_soon
        self.bus.listen(self._noticed)
        self._tasks.begin(self._turns.run(), "session turns")
        self._tasks.begin(self._beats(), "session beats")

    async def stop(self) -> None:
        """After the supervisor: no worker is left."""
        if await self._tasks.stop():
            await self._try(self._turns.finish())
            await self.registry.stop()

    async def _try(self, work: Any) -> Any:
        """Trouble of the registry never ends a session."""
        try:
            return await work
        except OstlerError as error:
            log.warning("the registry of sessions: %s", error)
            return None

    # ---- the plane

    def plane_is_up(self, send: Callable[..., None]) -> None:
        """A plane begins, perhaps not the first: it learns everything that it needs."""
        self._send = send
        self.tell_pools()
        for serving in self.workers.values():
            if serving.gone is None:
                self._say_up(serving)
        if self.neighbours is not None:
            self.neighbours.forget()

    def plane_is_gone(self) -> None:
        """Its connections went with it."""
        self._send = None
        self.first_in_line, self.waiting = {}, {}
        for counts in self._counts.values():
            counts.before, counts.plane = counts.before + counts.plane, Counter()
        for live in [*self.held.values()]:
            self._over(
                live,
                "relay-lost",
                {"text": "ostler: the relay has died", "bytes_in": live.bytes_in, "bytes_out": live.bytes_out},
            )

    @property
    def has_plane(self) -> bool:
        return self._send is not None

    def say(self, *frame: object) -> bool:
        """Tell the plane; False while there is none."""
        if self._send is not None:
            self._send("sessions", *frame)
        return self._send is not None

    def _noticed(self, event: object) -> None:
        if isinstance(event, PoolPaused):  # also where a pool has no worker now that could be told
            self.tell_pools()

    def tell_pools(self) -> None:
        pools = {}
        for name, spec in self.specs.items():
            pools[name] = {**spec.terms(), "paused": self.supervisor.pauses.holds(name)}
        self.say("pools", pools)

    def _say_up(self, serving: Serving) -> None:
        info, options = serving.info, serving.spec.options
        about = {
            "address": info["address"],
            "path": info.get("path") or "/",
            "slots": options.slots,
            "lifetime": options.lifetime,
            "served": serving.worker.served,
            "opens": bool(info.get("opens")),
            "versions": list(info.get("versions") or options.versions),
            "product": info.get("product") or options.product,
            "door": info.get("door"),
            "cdp": info.get("cdp"),
            "lends": info.get("lends"),
        }
        self.say("up", serving.spec.name, *serving.key, about)
        if serving.closing:
            self.say("close", *serving.key)

    def heard(self, frame: Frame) -> None:
        """What the plane says."""
        match frame:
            case ["admit", str(session), str(component), int(generation), dict(about)]:
                self._admit(session, self.workers.get(WorkerKey(component, generation)), about)
            case ["ended", str(session), str(reason), dict(about)]:
                if live := self.held.get(session):
                    self._over(live, reason, about)
            case ["empty", str(), int()]:
                self.supervisor.wake()
            case ["strike", str(component), int(generation), str(text)]:
                self._strike(self.workers.get(WorkerKey(component, generation)), text)
            case ["want", str(name), int(waiting)]:
                for spec in self.specs.values():
                    if spec.serves == name:
                        self.supervisor.reserving.rouse(self.supervisor.pools[spec.name], waiting)
            case ["facts", dict(facts)]:
                self._facts(facts)
            case _:
                log.warning("the data plane said something of sessions that is not understood: %r", frame[:1])

    def _facts(self, facts: Mapping[str, Any]) -> None:
        for session, (bytes_in, bytes_out, idle, state) in facts.get("live", {}).items():
            if live := self.held.get(session):
                live.state = state
                if not live.ticket:  # its bytes go through the worker's own door
                    live.bytes_in, live.bytes_out, live.idle = bytes_in, bytes_out, idle
        self.first_in_line, self.waiting = facts.get("lines", {}), facts.get("lines_total", {})
        for name, counts in facts.get("counts", {}).items():
            self.counters(name).plane = Counter(counts)
        self.touched()

    def touched(self) -> None:
        self.bus.send(SessionsTouched())

    def counters(self, name: str) -> Counts:
        """Of the sessions of one public name."""
        return self._counts.setdefault(name, Counts())

    def _strike(self, serving: Serving | None, text: str) -> None:
        if serving is not None:
            self.counters(serving.spec.serves).strikes += 1
            log.warning("%s could not be reached by the relay: %s", serving.worker.component, text)

    # ---- a session, from admission to its end

    def _admit(self, session: str, serving: Serving | None, about: dict[str, Any]) -> None:
        if serving is None or not serving.takes:
            self.say("refused", session, "worker", "the worker takes no new sessions", None)
            return
        live = Live(session, serving, about, time.monotonic(), now_ms())
        self.held[session] = live
        serving.live.add(session)
        opens, redirects = bool(serving.info.get("opens")), serving.spec.options.redirect
        live.is_open = not (opens or redirects)
        if live.is_open and serving.info.get("views"):
            serving.note("open", session, about)  # for its live view
        if not live.is_open:
            live.ticket = secrets.token_urlsafe(18) if redirects else ""
            ticket = {"ticket": live.ticket} if redirects else {}
            serving.worker.send("open", session, {**about, **ticket})
            loop = asyncio.get_running_loop()
            live.clock = loop.call_later(
                _OPENS, self.refuse, live, "worker", f"the worker did not open it within {_OPENS:g} s"
            )
        self._turns.admit(live)
        self.supervisor.began(serving.worker)

    def refuse(self, live: Live, code: str, text: str, seconds: float | None = None) -> None:
        """It did not become a session."""
        if self.held.pop(live.id, None) is None:
            return
        self._turns.withdraw(live)
        self._forget(live)
        live.serving.worker.served -= 1
        if live.has_row:
            self._turns.end(live, Ended(live.id, "refused", text))
        self.say("refused", live.id, code, text, seconds)

    def _forget(self, live: Live, reason: str = "refused", text: str = "") -> None:
        serving = live.serving
        serving.live.discard(live.id)
        self.stop_clock(live)
        if serving.gone is None and (serving.info.get("opens") or live.ticket):
            serving.worker.send("close", live.id, reason, text)
        elif serving.gone is None and serving.info.get("views"):
            serving.note("close", live.id, reason, text)
        if serving.closing and not serving.live:
            self.supervisor.wake()

    def stop_clock(self, live: Live) -> None:
        if live.clock is not None:
            live.clock.cancel()
            live.clock = None

    def ready(self, live: Live) -> None:
        """The registry has its row, or the worker has opened it: when both are true, the client is connected."""
        if not (live.has_row and live.is_open) or live.admitted:
            return
        live.admitted, live.state = True, "live"
        self.stop_clock(live)
        ticket = {"ticket": live.ticket} if live.ticket else {}
        self.say("admitted", live.id, {**(live.opened or {}), **ticket})
        self.bus.send(SessionBegan(live.serving.spec.serves, float(live.about.get("waited_ms") or 0) / 1000))

    def _over(self, live: Live, reason: str, about: Mapping[str, Any]) -> None:
        """It has ended."""
        del self.held[live.id]
        waits = self._turns.withdraw(live)
        self._forget(live, reason, str(about.get("text") or ""))
        serving = live.serving
        if not waits:  # else it has no row, and needs none
            text, code = about.get("text"), about.get("code")
            self._turns.end(
                live,
                Ended(
                    live.id,
                    reason,
                    plain(str(text)) if text else None,
                    code if isinstance(code, int) else None,
                    int(about.get("bytes_in") or 0),
                    int(about.get("bytes_out") or 0),
                ),
            )
        lasted, name, owner = time.monotonic() - live.asked, serving.spec.serves, str(live.about.get("owner") or "")
        self.bus.send(SessionEnded(live.id, name, serving.worker.component, owner, reason, lasted, live.by))
        if serving.gone is None:
            self.supervisor.finished(serving.worker, idle=not serving.live, counts=False)
        elif serving.buried and not serving.live:
            self.unregister(serving)
        self.touched()

    def _judged(self, live: Live, verdict: Verdict) -> None:
        if live.id not in self.held:
            if verdict.ok and not self._turns.ends(live.id):  # refused by its worker meanwhile
                self._turns.end(live, Ended(live.id, "refused", "the worker did not open it"))
        elif verdict.ok:
            live.has_row = True
            self.ready(live)
        elif verdict.why in ("full", "unknown") and not live.again:
            # The registry has what is over, or has not what is there: the next beat puts that right, and it is tried once more.
            live.again = True
            self._hurry.set()
            asyncio.get_running_loop().call_later(_AGAIN, self._ask_again, live)
        else:
            self.refuse(live, "worker", f"the registry does not admit it: {verdict.why}")

    def _ask_again(self, live: Live) -> None:
        if live.id in self.held:
            self._turns.admit(live)

    # ---- workers

    def of(self, worker: Worker) -> Serving | None:
        return self.workers.get(WorkerKey(worker.component, worker.generation))

    async def announce(self, serving: Serving) -> None:
        """Registered, then known to the plane. A registry that is away does not hold the worker back: the next beat registers it."""
        await self._try(self.registry.announce(serving.entry()))
        if serving.gone is None:
            self._say_up(serving)
            self.touched()

    def unregister(self, serving: Serving) -> None:
        """It is gone; what is left of its sessions ends with it."""
        if self.workers.pop(serving.key, None) is None:
            return
        reason, text = serving.gone or ("worker-lost", "")
        for session in [*serving.live]:
            if live := self.held.get(session):
                self._over(live, reason, {"text": text, "bytes_in": live.bytes_in, "bytes_out": live.bytes_out})
        self.supervisor.spawn_task(self._leave(serving.key, reason, text), "session worker leaves")

    async def _leave(self, worker: WorkerKey, reason: str, text: str) -> None:
        await self._try(self._turns.finish())
        await self._try(self.registry.leave(worker, reason, text))

    # ---- now and then

    def look_soon(self) -> None:
        """Somebody may want something of this node."""
        self._hurry.set()
        if self.neighbours is not None:
            self.neighbours.look_soon()

    async def _beats(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every):
                    await self._hurry.wait()
            self._hurry.clear()
            try:
                await self.beat_now()
            except OstlerError as error:
                log.warning("the registry of sessions: %s", error)
            except Exception:
                log.exception("a beat of sessions failed; it goes on")

    async def beat_now(self) -> None:
        """The registry hears of all workers, and says what is wanted of them."""
        beats = []
        for serving in self.workers.values():
            live = {
                s: (self.held[s].bytes_in, self.held[s].bytes_out)
                for s in serving.live
                if s in self.held and self.held[s].has_row
            }
            status = "draining" if serving.closing else "available"
            beats.append(Beat(*serving.key, status, serving.worker.served, live))
        wanted = await self.registry.beat(beats)
        for key, state in wanted.items():
            asked = self.workers.get(key)
            if state == DRAIN and asked is not None and not asked.closing:
                log.info("%s drains: the registry asks for it", key.component)
                asked.closing = True
                self.say("close", *key)
                asked.worker.tired = "the registry wants it to drain"
                self.supervisor.wake()

    # ---- what others ask

    def kill(self, session: str, by: str) -> bool:
        """End a session of this node."""
        live = self.held.get(session)
        if live is None:
            return False
        live.by = by
        self.say("kill", session, "killed", f"ostler: the session was ended by {by}")
        return True

    async def end_elsewhere(self, session: str) -> bool:
        """Ask the node that has it to end it."""
        return await self.registry.end(session)

    def view_socket(self, session: str) -> str | None:
        """Where its live view is served, if it has one."""
        live = self.held.get(session)
        return None if live is None else live.serving.info.get("views")

    def capacity(self) -> dict[str, dict[str, Any]]:
        return figures.capacity(self)

    def live(self) -> list[dict[str, Any]]:
        return figures.live(self)

    def lines(self) -> dict[str, dict[str, Any]]:
        return figures.lines(self)

    def counts(self) -> dict[str, dict[str, int]]:
        return figures.counts(self)
