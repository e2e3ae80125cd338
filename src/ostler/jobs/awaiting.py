"""Waiting for a job to end, from any program. Standard library alone.

The node of the data directory is asked, and answers when the job has ended (`GET /api/v1/jobs/{id}?wait=…`). Where no node runs here,
or it does not answer, the store is read again and again: after 50 ms at first, each second in the end. On PostgreSQL that is cut short
by a NOTIFY of whoever ends the job; all that wait in a process share one connection that listens (`store/bell.Ends`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

from ostler import private
from ostler.calls.address import is_node, node_url
from ostler.calls.exchange import Question, fetched
from ostler.calls.links import BlockingLinks, Links, LoopLinks, Where, run
from ostler.errors import BadArguments, CallError, JobCancelled, JobFailed, JobTimeout
from ostler.jobs import handle
from ostler.jobs.outcome import in_seconds

if TYPE_CHECKING:
    from ostler.jobs.producer import Producer
    from ostler.store.bell import Ends
    from ostler.store.store import Store

_ENDED = ("done", "failed", "cancelled")
_ASK = 30.0  # seconds that the node lets one question wait
_SLACK = 10.0  # seconds after that in which it answers
_FIRST, _LAST = 0.05, 1.0  # seconds between two looks into the store
_HEARD = 5.0  # … while the end would be told
_RENEW = 30.0  # seconds after which it is written down again that somebody waits; it holds for twice as long
_MORE = 2_000_000  # bytes of an answer beside arguments and result

View = dict[str, Any]
T = TypeVar("T")


def deadline(timeout: float | timedelta | None) -> float | None:
    """Until when to wait, by the monotonic clock. Raises BadArguments."""
    if timeout is None:
        return None
    seconds = in_seconds(timeout)
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 <= seconds < math.inf:
        raise BadArguments(f"timeout must be a number of seconds from 0, or a timedelta, found {timeout!r}")
    return time.monotonic() + seconds


def outcome(view: View, timeout: float | timedelta | None = None) -> Any:
    """The result of a job that is done. Raises JobFailed, JobCancelled, or JobTimeout when it has not ended."""
    __tracebackhide__ = True
    status, job, task = view["status"], view["id"], view["task"]
    if status == "done":
        return view["result"]
    if status not in _ENDED:
        message = f"job {job} ({task}) has not ended within {in_seconds(timeout) or 0:g} s: {_state(view)}"
        raise JobTimeout(job, task, status, message)
    error = view["error"] or {}
    kind = JobCancelled if status == "cancelled" else JobFailed
    message = error.get("message") or "it does not say why"
    raise kind(job, task, error.get("code") or "CANCELLED", message, error.get("traceback"), view["errors"])


def _state(view: View) -> str:
    why = (view.get("waiting_for") or {}).get("text")
    if view["status"] == "queued":
        return f"it is queued{f'; {why}' if why else ''}"
    done = "" if view["progress"] is None else f", at {view['progress']:g} %"
    return f"it is {view['status']}{done}{', ' + view['stage'] if view['stage'] else ''}"


class _Way(Protocol):
    """How a program waits: on an event loop, or by blocking. The methods of the latter never wait, so `links.run` drives them."""

    links: Links

    async def fetch(self, question: Question) -> tuple[int, bytes]: ...

    async def call(self, work: Callable[[], T]) -> T: ...

    def bell(self) -> _Bell: ...

    async def sleep(self, bell: _Bell, seconds: float) -> None:
        """Until it rings, or for so many seconds."""
        ...


class _Bell(Protocol):
    def ring(self) -> None:
        """From any thread."""


class _Blocking:
    def __init__(self) -> None:
        self.links: Links = BlockingLinks()

    async def fetch(self, question: Question) -> tuple[int, bytes]:
        return await fetched(self.links, question)

    async def call(self, work: Callable[[], T]) -> T:
        return work()

    def bell(self) -> _BlockingBell:
        return _BlockingBell()

    async def sleep(self, bell: _Bell, seconds: float) -> None:
        assert isinstance(bell, _BlockingBell)
        bell.event.wait(seconds)
        bell.event.clear()


class _BlockingBell:
    def __init__(self) -> None:
        self.event = threading.Event()

    def ring(self) -> None:
        self.event.set()


class _Looped:
    def __init__(self) -> None:
        self.links: Links = LoopLinks()

    async def fetch(self, question: Question) -> tuple[int, bytes]:
        import asyncio  # noqa: PLC0415  who never awaits does not load it

        async with asyncio.timeout(None if question.until is None else question.until - time.monotonic()):
            return await fetched(self.links, question)

    async def call(self, work: Callable[[], T]) -> T:
        import asyncio  # noqa: PLC0415

        return await asyncio.to_thread(work)

    def bell(self) -> _LoopedBell:
        return _LoopedBell()

    async def sleep(self, bell: _Bell, seconds: float) -> None:
        import asyncio  # noqa: PLC0415

        assert isinstance(bell, _LoopedBell)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await bell.event.wait()
        bell.event.clear()


class _LoopedBell:
    def __init__(self) -> None:
        import asyncio  # noqa: PLC0415

        self.event, self._loop = asyncio.Event(), asyncio.get_running_loop()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self.event.set)


class Awaiting:
    """Waits for jobs of one store. Threads and event loops may share it."""

    def __init__(self, producer: Producer) -> None:
        self.producer = producer
        self._blocking, self._looped = _Blocking(), _Looped()
        self._ends: Ends | None = None
        self._pid, self._lock = 0, threading.Lock()

    def ended(self, job: int, until: float | None) -> View:
        """The job when it has ended, or as it is at `until`. Raises NotFound.

        Waiting on the event loop of the node itself is a BadArguments: it would stop the node.
        """
        if _on_a_loop() and is_node(self.producer.settings) and self.look(job)["status"] not in _ENDED:
            raise BadArguments(
                f"job {job} has not ended, and waiting for it here would block the node: use await ….result_async() in a route that is "
                "an async function"
            )
        return run(self._ended(self._blocking, job, until))

    async def ended_async(self, job: int, until: float | None) -> View:
        """`ended` without blocking the event loop."""
        return await self._ended(self._looped, job, until)

    async def _ended(self, way: _Way, job: int, until: float | None) -> View:
        found = await way.call(lambda: self.look(job))
        if found["status"] not in _ENDED and until is None:
            refuse_endless(job)
        delay, bell = _FIRST, way.bell()
        with contextlib.ExitStack() as listening:
            renewed: float | None = None
            while found["status"] not in _ENDED:
                left = math.inf if until is None else until - time.monotonic()
                if left <= 0:
                    return found if "waiting_for" in found else await way.call(lambda: self.look(job, explained=True))
                told = await self._ask(way, job, left)
                if told is not None:
                    found = told
                    continue
                if (ends := self._listener()) and (renewed is None or time.monotonic() - renewed > _RENEW):
                    if renewed is None:
                        listening.enter_context(ends.waiting(job, bell.ring))
                    renewed = time.monotonic()
                    await way.call(lambda: self._say_waiting(job))
                else:
                    await way.sleep(bell, min(delay, left))
                    delay = min(1.5 * delay, _HEARD if ends and ends.hears.is_set() else _LAST)
                found = await way.call(lambda: self.look(job))
        return found

    def _listener(self) -> Ends | None:
        """What hears the ends of jobs in this process; None where nobody tells them."""
        from ostler.store.bell import Ends  # noqa: PLC0415
        from ostler.store.database import is_postgres  # noqa: PLC0415

        url = self.producer.settings.store
        if not is_postgres(url):
            return None
        with self._lock:
            if self._ends is None or self._pid != os.getpid():  # a fork has no thread
                self._ends, self._pid = Ends(url), os.getpid()
            return self._ends

    def _say_waiting(self, job: int) -> None:
        self.producer.read(lambda store: store.jobs.await_end(job, store.now() + int(2000 * _RENEW)))

    async def _ask(self, way: _Way, job: int, left: float) -> View | None:
        """What the node says of the job when it has ended, or after a while. None: there is no node here, or it cannot say."""
        settings, wait = self.producer.settings, min(left, _ASK)
        if (url := node_url(settings)) is None:
            return None
        parts = urlsplit(url)
        lines = [f"GET {parts.path}/api/v1/jobs/{job}?wait={wait:.3f} HTTP/1.1", f"host: {parts.netloc}"]
        if token := settings.token or private.read_token(settings.data_dir):
            lines.append(f"authorization: Bearer {token}")
        head = "\r\n".join([*lines, "", ""]).encode()
        most = 2 * settings.max_payload + _MORE
        try:
            status, body = await way.fetch(
                Question(Where.of(url), url, head, (), time.monotonic() + wait + _SLACK, most)
            )
            return json.loads(body) if status == 200 else None
        except (CallError, TimeoutError, ValueError):  # the store knows, too
            return None

    def look(self, job: int, *, explained: bool = False, errors: bool = False) -> View:
        """The job as the store has it now, on request with the reason why it waits. Raises NotFound.

        A job that failed or was cancelled has the errors of its runs with it, any other on request.
        """
        settings = self.producer.settings

        def read(store: Store) -> View:
            from ostler.jobs.waiting import explain  # noqa: PLC0415
            from ostler.store.database import place  # noqa: PLC0415

            found = store.jobs.find(job)
            if errors or found["status"] in ("failed", "cancelled"):
                found["errors"] = store.jobs.errors(job)
            if explained:
                nobody = not store.db.shared and node_url(settings) is None
                where = place(settings.store, settings.data_dir)
                found["waiting_for"] = explain(store, job, store.now(), nobody=nobody, where=where)
            return found

        return self.producer.read(read)


def _on_a_loop() -> bool:
    """Whether this thread runs an event loop now."""
    loops = sys.modules.get("asyncio.events")
    return loops is not None and loops._get_running_loop() is not None  # noqa: SLF001


def refuse_endless(job: int) -> None:
    """Inside a job, raise BadArguments: waiting without a timeout keeps its worker busy, and the other job may need that worker."""
    if handle.running is None:
        return
    own = handle.running.id
    raise BadArguments(
        f"job {own} waits for job {job} without a timeout: it would block its worker, and job {job} may need that "
        "worker. Use a chain (a.s(…).then(b.s(), into=…)) or a batch with a callback, or call result(timeout=…)"
    )
