"""The two ways to serve browsers: one browser that sessions share, and a browser for each session."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from ostler import ConfigError, Endpoint
from ostler.apps.browsers import installed, view
from ostler.apps.browsers.cdp import CdpBrowser
from ostler.apps.browsers.driver import PRODUCT, BrowserFailed, Driver, Held
from ostler.apps.browsers.given import PREFIX, Given
from ostler.apps.browsers.place import Place
from ostler.sessions.handle import Session, SessionWorker

_EVERY = 0.7  # seconds between two questions to a browser of its own
_MISS, _AGAIN = 0.9, 0.5  # seconds for the answer, and for the one right after a miss
_TOLD = 0.5  # seconds for the client of a browser that hangs to be told, before the browser is ended
_NO_SANDBOX = re.compile(
    r"no usable sandbox|move to new namespace|without --no-sandbox|suid sandbox|credentials\.cc", re.IGNORECASE
)
_SPARES = 1  # browsers that are ready before anybody asks
_LATE = 2.0  # seconds for a browser to start, until another one is started instead of it
_TRIES = 3  # browsers that are started for one client at once, at most


@dataclass(frozen=True, slots=True)
class Launch:
    """What a pool's browsers are. Without a driver they are for CDP clients."""

    browser: installed.Browser
    driver: installed.Driver | None
    given: Given
    keeps: bool = False  # contexts outlive the connection: a client can come back to them
    args: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.driver is None and (self.browser.kind != "chromium" or not self.browser.path):
            raise ConfigError(f"CDP needs the path of a Chromium, and {self.browser.name} is none")


class _Grid:
    """What both have in common: a place, a driver unless they speak CDP, and how a browser is started."""

    launch: ClassVar[Launch]

    async def start(self, worker: SessionWorker) -> Endpoint:
        """The first browser. Where it does not start, nothing is left of it."""
        await self._prepare(worker)
        try:
            return await self._begin()
        except BaseException:
            await self.stop()
            raise

    async def _begin(self) -> Endpoint:
        raise NotImplementedError

    async def _prepare(self, worker: SessionWorker) -> None:
        self._worker, self._stopping = worker, False
        given = self.launch.given
        self._place = Place.make(worker.scratch, worker.name, given.user)
        self._driver: Driver | None = None
        if given.sandbox and self._place.is_root and self.launch.browser.kind == "chromium":
            raise ConfigError(
                f"Chromium's sandbox does not work for root: name another user with {PREFIX}USER, or switch it off with {PREFIX}SANDBOX=off"
            )
        if not given.sandbox:
            worker.log.warning(
                "the browser's sandbox is off (%sSANDBOX): open nothing but pages that you trust", PREFIX
            )
        if self.launch.driver is not None:
            lends = worker.scratch / "private" / "l"
            self._driver = Driver(self._place, self.launch.driver, lends, self.launch.browser.store)
            await self._driver.start()
            self._driver.lost.add_done_callback(lambda lost: self._lost(lost.result()))

    def _lost(self, why: str) -> None:
        if not self._stopping:
            self._worker.lost(why)

    async def _start(self, name: str) -> Held | CdpBrowser:
        launch, browser = self.launch, self.launch.browser
        args = [*launch.given.args, *launch.args]
        if found := browser.path or browser.store:
            self._place.check(Path(found))
        try:
            if self._driver is None:
                own = CdpBrowser(self._place, name)
                await own.start(str(browser.path), args if launch.given.sandbox else ["--no-sandbox", *args])
                return own
            options: dict[str, Any] = {"headless": True, "args": args, "_sharedBrowser": launch.keeps}
            if browser.path:
                options["executablePath"] = browser.path
            if browser.kind == "chromium":
                options["chromiumSandbox"] = launch.given.sandbox
            return await self._driver.launch(name, browser.kind, options)
        except BrowserFailed as error:
            raise BrowserFailed(_explained(str(error))) from None

    async def stop(self) -> None:
        """End all browsers."""
        self._stopping = True
        if self._driver is not None:
            await self._driver.stop()


def _explained(text: str) -> str:
    """With what to do about it, where that is known."""
    if _NO_SANDBOX.search(text):
        return (
            "the browser's sandbox does not work here: allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, "
            "kernel.apparmor_restrict_unprivileged_userns=0; in a container: a seccomp profile that permits them), or switch the "
            f"sandbox off with {PREFIX}SANDBOX=off and open nothing but pages that you trust. The browser said: {text[-600:]}"
        )
    return text


class Shared(_Grid):
    """One warm browser. Each session has its own contexts in it, which are closed when it ends."""

    async def _begin(self) -> Endpoint:
        self._browser = await self._start("s")
        self._browser.gone.add_done_callback(lambda gone: self._lost(gone.result()))
        return self._browser.endpoint

    async def close(self, session: Session) -> None:
        if self._driver is not None:
            self._driver.owners.pop(session.id, None)

    async def probe(self) -> None:
        await self._browser.ask()

    async def view(self, session: Session) -> AsyncIterator[bytes]:
        """The session's own newest page."""
        if self._driver is None or self.launch.browser.kind != "chromium":
            return
        owners = self._driver.owners
        async for frame in view.frames(self._browser, lambda: owners.get(session.id, set())):
            yield frame


class Dedicated(_Grid):
    """A browser for each session, started before anybody asks; it ends with the session."""

    async def _begin(self) -> Endpoint:
        self._numbers = itertools.count()
        self._held: dict[str, Held | CdpBrowser] = {}
        self._sessions: dict[str, Session] = {}
        self._spares: deque[Held | CdpBrowser] = deque()
        self._starting: set[asyncio.Task[Held | CdpBrowser]] = set()
        self._late: set[asyncio.Task[Held | CdpBrowser]] = set()  # … and take long: nobody waits for them
        self._tasks: set[asyncio.Task[None]] = set()
        first = await self._launch()
        self._spares.append(first)
        versions = [self.launch.driver.serves] if self.launch.driver else []
        product, own = PRODUCT if versions else "", first.endpoint
        return Endpoint("", versions=versions, product=product, cdp=own.cdp, lends=own.lends)

    async def open(self, session: Session) -> Endpoint:
        browser = await self._take()
        self._held[session.id], self._sessions[session.id] = browser, session
        self._refill()
        return browser.endpoint

    async def close(self, session: Session) -> None:
        self._sessions.pop(session.id, None)
        if (browser := self._held.pop(session.id, None)) is not None:
            await browser.kill()
        self._refill()

    async def probe(self) -> None:
        """Each browser is watched by itself; this is about what they share."""
        if self._driver is not None:
            await self._driver.call("ping")

    async def view(self, session: Session) -> AsyncIterator[bytes]:
        if (browser := self._held.get(session.id)) is not None and self.launch.browser.kind == "chromium":
            async for frame in view.frames(browser, lambda: None):
                yield frame

    async def stop(self) -> None:
        self._stopping = True
        starting = [*self._starting, *self._late]
        for task in [*self._tasks, *starting]:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        await asyncio.gather(*(browser.kill() for browser in [*self._held.values(), *self._spares]))
        await super().stop()

    async def _launch(self) -> Held | CdpBrowser:
        browser = await self._start(f"s{next(self._numbers)}")
        watching = asyncio.create_task(self._watch(browser))
        self._tasks.add(watching)
        watching.add_done_callback(self._tasks.discard)
        return browser

    async def _take(self) -> Held | CdpBrowser:
        """A browser that is ready, or the one that is being started, or one more."""
        while self._spares:
            browser = self._spares.popleft()
            if not browser.gone.done():
                return browser
        tasks: set[asyncio.Task[Held | CdpBrowser]] = set()  # what this client waits for
        late: set[asyncio.Task[Held | CdpBrowser]] = set()
        try:
            for tries in range(1, _TRIES + 1):
                task = self._starting.pop() if self._starting else asyncio.create_task(self._launch())
                task.remove_done_callback(self._ready)
                tasks.add(task)
                patience = _LATE if tries < _TRIES else None
                done, late = await asyncio.wait(tasks, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                tasks = late
                for task in done:
                    if task.exception() is None or not tasks or tries == _TRIES:
                        return task.result()
            raise AssertionError("the last try ends in one way or the other")
        finally:  # the client has one, or has gone: the others are for the next one, who does not wait for what is late
            for task in tasks:
                self._keep(task, late=task in late)

    def _refill(self) -> None:
        """Start the next one, while a session more may come."""
        ready = len(self._spares) + len(self._starting)
        if self._stopping or ready >= _SPARES or ready + len(self._held) >= self._worker.slots:
            return
        self._keep(asyncio.create_task(self._launch()))

    def _keep(self, task: asyncio.Task[Held | CdpBrowser], *, late: bool = False) -> None:
        (self._late if late else self._starting).add(task)
        task.add_done_callback(self._ready)

    def _ready(self, task: asyncio.Task[Held | CdpBrowser]) -> None:
        self._starting.discard(task)
        self._late.discard(task)
        if task.cancelled() or self._stopping:
            return
        if error := task.exception():
            self._worker.log.error("no browser could be started in advance: %s", error)
        else:
            self._spares.append(task.result())

    async def _watch(self, browser: Held | CdpBrowser) -> None:
        """Until its end: ask whether it answers, and end it when it does not. Its client is told."""
        while not browser.gone.done():
            if await _answers(browser, _MISS) or await _answers(browser, _AGAIN):
                await asyncio.wait([browser.gone], timeout=_EVERY)
                continue
            text = f"the browser hangs: it did not answer for {_MISS + _AGAIN:g} s"
            if self._tell(browser, text):  # its client is told first, and the end of the session ends the browser
                await asyncio.wait([browser.gone], timeout=_TOLD)
            await browser.kill(f"ostler: {text}")
        self._tell(browser, browser.gone.result())
        with contextlib.suppress(ValueError):
            self._spares.remove(browser)
        self._refill()

    def _tell(self, browser: Held | CdpBrowser, text: str) -> bool:
        """Say to whoever has it that it is lost; False where nobody has it, or knows already."""
        session = next(
            (self._sessions.pop(s) for s, held in self._held.items() if held is browser and s in self._sessions), None
        )
        if session is None or self._stopping:
            return False
        self._worker.log.warning("session %s: %s", session.id, text)
        session.lost(text)
        return True


async def _answers(browser: Held | CdpBrowser, patience: float) -> bool:
    try:
        async with asyncio.timeout(patience):
            await browser.ask()
    except TimeoutError:
        return browser.gone.done()
    except BrowserFailed:
        return True  # it is gone, which its end tells
    return True
