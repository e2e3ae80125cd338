"""A Playwright driver with browsers: one Node process, which runs serve.js and holds as many browsers as it is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ostler import Endpoint, OstlerError
from ostler.apps.browsers import installed
from ostler.apps.browsers.channel import Channel
from ostler.apps.browsers.place import Place

log = logging.getLogger("ostler.browsers")

_SCRIPT, _LINES = (Path(__file__).with_name(name) for name in ("serve.js", "line.js"))
_LONGEST = 64 * 1024 * 1024  # bytes of one message, at most: a frame of a live view is part of one
_START = 30.0  # seconds
_STOP = 3.0
PRODUCT = "Playwright"  # how clients begin their User-Agent


class BrowserFailed(OstlerError):
    """A browser, or the driver that holds it, does not do what it was asked."""


class Held:
    """One browser of a driver. `gone` is done when it has died, with the cause in words."""

    def __init__(self, driver: Driver, name: str, endpoint: Endpoint) -> None:
        self.name, self.endpoint = name, endpoint
        self.pid = 0
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ears: dict[str, Callable[[dict[str, Any]], None]] = {}  # by CDP session
        self.pages: dict[str, None] = {}  # in the order in which they were opened
        self._driver = driver

    async def ask(self) -> None:
        """A question to the browser itself; it hangs where the browser does."""
        await self._driver.call("ask", name=self.name)

    async def send(self, method: str, **params: Any) -> Any:
        """A CDP command to the browser."""
        return await self._driver.call("send", name=self.name, method=method, params=params)

    async def kill(self, text: str = "") -> None:
        """End it now; clients that are still connected are told the text."""
        with contextlib.suppress(BrowserFailed):
            await self._driver.call("kill", name=self.name, text=text)


class Driver:
    """The process. When it ends by itself, all its browsers are gone with it."""

    def __init__(self, place: Place, files: installed.Driver, lends: Path, store: str | None = None) -> None:
        self._place, self._files, self._lends = place, files, lends
        self._store = {"PLAYWRIGHT_BROWSERS_PATH": store} if store else {}  # its home is another, so it is told
        self._browsers: dict[str, Held] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._last = 0
        self.owners: dict[str, set[str]] = {}  # session -> its contexts, in a browser that several share
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start it; raises ConfigError where its user cannot, BrowserFailed where it does not come up."""
        self._place.check(self._files.node, self._files.package, _SCRIPT, _LINES)
        self._channel = Channel(self._lends)
        try:
            self._process = await asyncio.create_subprocess_exec(
                self._files.node,
                _SCRIPT,
                self._files.package,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_LONGEST,
                cwd=self._place.folder,
                env={**self._place.variables(), **self._store, **self._channel.variables},
                pass_fds=(self._channel.theirs.fileno(),),
                **self._place.as_user(),
            )
        except BaseException:
            self._channel.close()
            raise
        self._channel.inherited()
        self._up = asyncio.get_running_loop().create_future()
        self._reading = asyncio.create_task(self._read(), name="driver")
        try:
            async with asyncio.timeout(_START):
                await self._up
        except TimeoutError:
            raise BrowserFailed(f"the driver {self._files.folder} did not start within {_START:g} s") from None

    async def launch(self, name: str, kind: str, options: dict[str, Any]) -> Held:
        """A browser that takes clients on a socket of its name in the driver's directory; raises BrowserFailed."""
        home = self._place.sub(f"{name}.d")
        endpoint = Endpoint(str(self._place.folder / name), "/", [self._files.serves], PRODUCT, lends=str(self._lends))
        held = self._browsers[name] = Held(self, name, endpoint)
        try:
            told = await self.call(
                "launch", name=name, kind=kind, options={**options, "env": self._place.variables(home)}
            )
        except BaseException:
            self._forget(name, "it did not start")
            raise
        held.pid = told["pid"]
        return held

    async def call(self, verb: str, **given: Any) -> Any:
        """What the driver answers; raises BrowserFailed."""
        if self.lost.done():
            raise BrowserFailed(self.lost.result())
        self._last = number = self._last + 1
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"id": number, "do": verb, **given}).encode() + b"\n")
            return await answer
        finally:
            self._answers.pop(number, None)

    async def stop(self) -> None:
        """End its browsers and itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_STOP):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reading

    async def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):  # a line over the limit: the driver is out of step
            async for line in self._process.stdout:
                self._hear(json.loads(line))
        code = await self._process.wait()
        self._end(f"the browser's driver died ({_ending(code)})")

    def _hear(self, said: dict[str, Any]) -> None:
        match said:
            case {"id": int(number), "error": str(text)}:
                if (answer := self._answers.pop(number, None)) and not answer.done():
                    answer.set_exception(BrowserFailed(text))
            case {"id": int(number), "ok": result}:
                if (answer := self._answers.pop(number, None)) and not answer.done():
                    answer.set_result(result)
            case {"event": "target", "browser": name, "params": params}:
                if (held := self._browsers.get(name)) and (ear := held.ears.get(params["sessionId"])):
                    ear(json.loads(params["message"]))
            case {"event": "created", "browser": name, "target": target}:
                if held := self._browsers.get(name):
                    held.pages[target] = None
            case {"event": "destroyed", "browser": name, "target": target}:
                if held := self._browsers.get(name):
                    held.pages.pop(target, None)
            case {"event": "context", "session": session, "context": context}:
                self.owners.setdefault(session, set()).add(context)
            case {"event": "gone", "browser": name, "code": code, "signal": signal}:
                self._forget(name, f"the browser died ({signal or f'exit code {code}'})")
            case {"event": "up"}:
                self._up.set_result(None)

    def _forget(self, name: str, why: str) -> None:
        if (held := self._browsers.pop(name, None)) is not None and not held.gone.done():
            held.gone.set_result(why)
        self._place.remove(f"{name}.d")

    def _end(self, why: str) -> None:
        self._channel.close()
        for name in [*self._browsers]:
            self._forget(name, why)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(BrowserFailed(why))
        if not self._up.done():
            self._up.set_exception(BrowserFailed(why))
        if not self.lost.done():
            self.lost.set_result(why)


def _ending(code: int) -> str:
    import signal  # noqa: PLC0415  only for an end that nobody asked for

    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
