"""The program of a session worker: `python -m ostler.sessions.worker APP POOL SCRATCH OPTIONS`. Standard library alone.

It runs the declared class on an event loop: start, then ready; open and close around each session; a probe all the time. Clients' bytes do
not come through here: the data plane connects them to the endpoint that `start` or `open` names.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostler.errors import ConfigError
from ostler.lifecycle import family
from ostler.lifecycle.child import APP_LOAD, Channel, leave
from ostler.lifecycle.wire import Frame
from ostler.sessions import views
from ostler.sessions.door import Door
from ostler.sessions.handle import Session, SessionWorker
from ostler.sessions.spec import Endpoint
from ostler.sessions.splice import Limits

if TYPE_CHECKING:
    from ostler.sessions.spec import SessionSpec

log = logging.getLogger("ostler.sessions")

_PROBE, _AGAIN = 1.0, 0.5  # seconds in which a probe must answer, and the one right after a miss
_MISSES, _PATIENT = 2, 5  # in a row: it hangs; and where the machine has far more to do than it can
_PAUSE = 0.2  # seconds between a miss and the next probe
_CROWDED = 3.0  # processes for each core that want to run
_CONNECTS = 5.0  # seconds between two probes that only connect
_WEIGHED = 10.0  # seconds between two looks at the family's memory
_SLOW = 10  # probes in a row that were too slow
_WORDS = 0.05  # seconds, when the node has died, to tell the clients at the worker's own door
_STOP = 5.0  # seconds that the code gets to end what it holds


class _Generator:
    """The short form, an async function that yields its endpoint, as a class."""

    def __init__(self, function: Callable[[SessionWorker], Any]) -> None:
        self._function = function

    async def start(self, worker: SessionWorker) -> object:
        self._running = self._function(worker)
        return await anext(self._running)

    async def stop(self) -> None:
        with contextlib.suppress(StopAsyncIteration):
            await anext(self._running)


class Child:
    """One worker's sessions."""

    def __init__(self, spec: SessionSpec, scratch: Path, options: dict[str, Any], channel: Channel) -> None:
        self._spec, self._options, self._channel = spec, options, channel
        self._loop = asyncio.get_running_loop()
        self._code: Any = spec.target() if inspect.isclass(spec.target) else _Generator(spec.target)
        self.worker = SessionWorker(
            os.environ.get("OSTLER_COMPONENT", spec.name),
            int(options["generation"]),
            str(scratch / "private" / "s"),
            scratch,
            int(options["slots"]),
            channel.send,
        )
        self._endpoint: Endpoint | None = None
        self.sessions: dict[str, Session] = {}
        self._opening: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stop = asyncio.Event()
        self._views: views.Views | None = None
        self._door: Door | None = None
        self.probe_ms: float | None = None
        self.pss_mb: float | None = None
        self._probed = time.monotonic()

    # ---- from start to exit

    async def run(self) -> None:
        """Serve until asked to stop."""
        given = await _result(self._code.start(self.worker))
        opens = hasattr(self._code, "open")
        if given is None and not opens:
            raise TypeError(
                f"sessions {self._spec.name!r}: start returned no endpoint, and there is no open() that names one"
            )
        self._endpoint = None if given is None else Endpoint.of(given)
        if self._endpoint is not None and self._endpoint.address:
            await _reachable(self._endpoint)
        told: dict[str, Any] = Endpoint.frame(self._endpoint) if self._endpoint else {"address": ""}
        if hasattr(self._code, "view"):
            self._views = views.Views(self._code, self.sessions, str(self.worker.scratch / "private" / "v"))
            told["views"] = await self._views.start()
        if self._options.get("redirect"):
            limits = Limits(*(self._options[name] for name in ("idle", "longest", "ping")))
            self._door = Door(self._options["host"], limits, self._channel.send)
            told["door"] = await self._door.start()
        self._channel.send("ready", {**told, "opens": opens})
        self._probed = time.monotonic()
        self._begin(self._probe(), "probe")
        self._begin(self._weigh(), "memory")
        await self._stop.wait()
        await self._end()

    async def _end(self) -> None:
        if self._door is not None:
            self._door.stop()
        opening = [*self._opening.values()]
        for task in [*self._tasks, *opening]:
            task.cancel()
        try:
            async with asyncio.timeout(_STOP):
                await asyncio.gather(*opening, return_exceptions=True)
                await asyncio.gather(*(self._closed(session) for session in [*self.sessions.values()]))
                if hasattr(self._code, "stop"):
                    await _result(self._code.stop())
                if self._views is not None:
                    await self._views.stop()
        except TimeoutError:
            log.warning("%s did not stop within %g s", self.worker.name, _STOP)

    def stop(self) -> None:
        self._stop.set()

    def orphaned(self, told: threading.Event) -> None:
        """The node has died."""
        if self._door is not None:
            self._door.stop("node-lost", "the node died", 1011)
        told.set()

    def _begin(self, work: Any, name: str) -> asyncio.Task[Any]:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- what the node says

    def heard(self, frame: Frame) -> None:
        match frame:
            case ["open", str(session), dict(about)]:
                self._opening[session] = self._loop.create_task(self._open(session, about))
            case ["close", str(session), str(reason), str(text)]:
                if self._door is not None:
                    self._door.end(session, reason, text)
                if (opening := self._opening.pop(session, None)) is not None:
                    opening.cancel()  # it closes what it has opened
                elif (found := self.sessions.pop(session, None)) is not None:
                    self._begin(self._closed(found), "close")
            case ["stop"]:
                self.stop()

    async def _open(self, session: str, about: dict[str, Any]) -> None:
        found = Session.of(session, about, self._channel.send)
        try:
            self.sessions[session] = found
            given = await _result(self._code.open(found)) if hasattr(self._code, "open") else None
            if self._opening.get(session) is not asyncio.current_task():
                raise asyncio.CancelledError  # over meanwhile, and the code took no notice
            endpoint = self._endpoint if given is None else Endpoint.of(given)
            if endpoint is None or not endpoint.address:
                raise TypeError("open() named no endpoint, and the worker has none of its own")
            if self._door is not None and about.get("ticket"):
                self._door.expect(about["ticket"], session, endpoint)
            self._channel.send("opened", session, {"address": endpoint.address, "path": endpoint.path})
        except asyncio.CancelledError:
            self.sessions.pop(session, None)
            await self._closed(found)
            raise
        except Exception as error:
            log.exception("session %s could not be opened", session)
            self.sessions.pop(session, None)
            self._channel.send("unopened", session, f"{type(error).__name__}: {error}"[:300])
        finally:
            if self._opening.get(session) is asyncio.current_task():
                del self._opening[session]

    async def _closed(self, session: Session) -> None:
        if hasattr(self._code, "close"):
            try:
                await _result(self._code.close(session))
            except Exception:
                log.exception("session %s: close() failed", session.id)

    # ---- is it well

    def facts(self) -> dict[str, Any]:
        """For the heartbeat; on the channel's own thread."""
        late = time.monotonic() - self._probed
        if self._is_probed and late > 5 * (_PROBE + max(self._options["probe"], _CONNECTS)):
            self._channel.send("hung", f"its event loop has been blocked for {late:.0f} s")
        door = {"door": self._door.facts()} if self._door else {}
        return {"sessions": [*self.sessions], "probe_ms": self.probe_ms, "pss_mb": self.pss_mb, **door}

    @property
    def _is_probed(self) -> bool:
        has_own = hasattr(self._code, "probe")
        return bool(self._options["probe"] and (has_own or (self._endpoint and self._endpoint.address)))

    async def _probe(self) -> None:
        """Ask it again and again. Two misses in a row are a hang, which the node hears of once; on a crowded machine it takes five."""
        own = getattr(self._code, "probe", None)
        every = self._options["probe"] if own is not None else max(self._options["probe"], _CONNECTS)
        misses = slow = 0
        told = False
        limit = self._options.get("slow_ms") or 0.0
        while self._is_probed:
            began = time.monotonic()
            why = await self._ask(own, _AGAIN if misses else _PROBE)
            self._probed = time.monotonic()
            misses = 0 if why is None else misses + 1
            if why is None:
                self.probe_ms = round((self._probed - began) * 1000, 2)
                slow = slow + 1 if limit and self.probe_ms > limit else 0
                if slow == _SLOW:
                    self._channel.send("tired", f"its probe takes {self.probe_ms:.0f} ms, limit {limit:.0f} ms")
            elif not told and misses >= (_PATIENT if _is_crowded() else _MISSES):
                told = True
                self._channel.send("hung", why)
            await asyncio.sleep(_PAUSE if why is not None and not told else every)

    async def _ask(self, own: Callable[[], Any] | None, patience: float) -> str | None:
        try:
            async with asyncio.timeout(patience):
                if own is not None:
                    await _result(own())
                else:
                    assert self._endpoint is not None
                    await _connect(self._endpoint.address)
        except TimeoutError:
            return f"its probe did not answer within {patience:g} s"
        except Exception as error:  # noqa: BLE001  whatever the code raises means unwell
            return f"its probe failed: {type(error).__name__}: {error}"[:200]
        return None

    async def _weigh(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                self.pss_mb = await asyncio.to_thread(family.pss_mb, os.getpid())
            await asyncio.sleep(_WEIGHED)


def _is_crowded() -> bool:
    """Whether what does not answer may only be waiting for its turn on a core."""
    return os.getloadavg()[0] > _CROWDED * (os.cpu_count() or 1)


class _Ear:
    """The channel's side of it: what comes before there is a child waits for it."""

    def __init__(self) -> None:
        self._early: deque[Frame] = deque()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._child: Child | None = None

    def hear(self, frame: Frame) -> None:
        with self._lock:
            if self._loop is None or self._child is None:
                self._early.append(frame)
                return
        self._loop.call_soon_threadsafe(self._child.heard, frame)

    def facts(self) -> dict[str, Any]:
        return self._child.facts() if self._child else {}

    def orphaned(self) -> None:
        """The node has died: clients at the worker's own door are told, and the worker follows it."""
        if self._loop is not None and self._child is not None:
            told = threading.Event()
            self._loop.call_soon_threadsafe(self._child.orphaned, told)
            told.wait(_WORDS)
        leave()

    def listen(self, loop: asyncio.AbstractEventLoop, child: Child) -> None:
        with self._lock:
            self._loop, self._child = loop, child
            for frame in self._early:
                loop.call_soon(child.heard, frame)


async def _result(value: Any) -> Any:
    """What a hook returned, awaited where it is async."""
    return await value if isinstance(value, Awaitable) else value


async def _connect(address: str) -> None:
    if address.startswith("tcp:"):
        host, _, port = address[4:].rpartition(":")
        _, writer = await asyncio.open_connection(host or "127.0.0.1", int(port))
    else:
        _, writer = await asyncio.open_unix_connection(address)
    writer.close()


async def _reachable(endpoint: Endpoint) -> None:
    """It is announced when somebody listens there: a program that the code has started may need a moment."""
    while True:
        with contextlib.suppress(OSError):
            await _connect(endpoint.address)
            return
        await asyncio.sleep(0.02)


def main(argv: list[str]) -> int:
    """Load the app, start the code, say ready, serve. The channel is open before the app loads, so a slow import still beats."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    target, pool, folder = argv[:3]
    options = json.loads(argv[3])
    scratch = Path(folder)
    ear = _Ear()
    channel = Channel(ear.hear, ear.facts, ear.orphaned)
    channel.open()
    from ostler.app import load  # noqa: PLC0415

    try:
        spec = load(target).session_pools[pool]
    except ConfigError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return APP_LOAD

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        child = Child(spec, scratch, options, channel)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, child.stop)
        ear.listen(loop, child)
        await child.run()

    try:
        scratch.mkdir(0o711, parents=True, exist_ok=True)
        (scratch / "private").mkdir(0o700, exist_ok=True)
        asyncio.run(serve())
    except Exception:  # noqa: BLE001
        traceback.print_exc()
        return 1
    finally:
        family.remove(scratch)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # threads and loops of libraries do not keep it
