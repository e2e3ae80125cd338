"""A Chromium that clients drive by CDP. No Playwright is needed for it: the worker starts it and talks to it over a pipe."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ostler import Endpoint
from ostler.apps.browsers.driver import BrowserFailed
from ostler.apps.browsers.place import Place

_MESSAGE = 64 * 1024 * 1024  # bytes, at most
_START = 30.0  # seconds
_WORDS = 0.2  # seconds for its last words
_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--remote-debugging-port=0",
    "--no-first-run",
    "--no-default-browser-check",
    "--no-service-autorun",
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-hang-monitor",
    "--disable-sync",
    "--disable-search-engine-choice-screen",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--mute-audio",
    "--password-store=basic",
)


class CdpBrowser:
    """One browser. Clients connect to a port on loopback; `gone` is done when it has died, with the cause in words."""

    def __init__(self, place: Place, name: str) -> None:
        self.name, self.pid = name, 0
        self.endpoint = Endpoint("")
        self.gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ears: dict[str, Callable[[dict[str, Any]], None]] = {}
        self.pages: dict[str, None] = {}  # in the order in which they were opened
        self._place = place
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._last = 0
        self._said: deque[str] = deque(maxlen=20)  # its last words

    async def start(self, program: str, args: list[str]) -> None:
        """Start it; raises BrowserFailed, ConfigError."""
        self._place.check(Path(program))
        home = self._place.sub(f"{self.name}.d")
        try:
            await self._spawn([program, *_FLAGS, f"--user-data-dir={home / 'profile'}", *args], home)
            async with asyncio.timeout(_START):
                version = await self.send("Browser.getVersion")
                await self.send("Target.setDiscoverTargets", discover=True, filter=[{"type": "page"}])
                port, path = await self._port(home / "profile" / "DevToolsActivePort")
        except TimeoutError:
            await self.kill()
            raise BrowserFailed(f"{program} did not start within {_START:g} s: {' '.join(self._said)}") from None
        except BaseException:
            await self.kill()
            raise
        self.endpoint = Endpoint(f"tcp:{port}", path, cdp=_described(version))

    async def _spawn(self, argv: list[str], home: Path) -> None:
        """It expects the pipe as its descriptors 3 and 4, and a shell puts them there."""
        self._process = await asyncio.create_subprocess_exec(
            "/bin/sh",
            "-c",
            'exec "$@" 3<&0 4>&1 </dev/null >/dev/null',
            "sh",
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=_MESSAGE,
            start_new_session=True,
            cwd=home,
            env=self._place.variables(home),
            **self._place.as_user(),
        )
        self.pid = self._process.pid
        self._tasks = [asyncio.create_task(work) for work in (self._read(), self._listen(), self._wait())]

    async def _port(self, file: Path) -> tuple[int, str]:
        """It writes this file when it listens."""
        while True:
            with contextlib.suppress(OSError, ValueError):
                port, path = file.read_text(encoding="ascii").split("\n")[:2]  # noqa: ASYNC240  two short lines
                return int(port), path
            if self.gone.done():
                raise BrowserFailed(self.gone.result())
            await asyncio.sleep(0.01)

    async def ask(self) -> None:
        """A question to the browser; it hangs where the browser does."""
        await self.send("Browser.getVersion")

    async def send(self, method: str, **params: Any) -> Any:
        """A CDP command; raises BrowserFailed."""
        if self.gone.done():
            raise BrowserFailed(self.gone.result())
        self._last = number = self._last + 1
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"id": number, "method": method, "params": params}).encode() + b"\0")
            return await answer
        finally:
            self._answers.pop(number, None)

    async def kill(self, text: str = "") -> None:
        """End it and all that it has started. Its clients are told the text by the relay."""
        if not self.pid:
            self._place.remove(f"{self.name}.d")
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        await self.gone

    async def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            while True:
                self._hear(json.loads((await self._process.stdout.readuntil(b"\0"))[:-1]))

    def _hear(self, said: dict[str, Any]) -> None:
        match said:
            case {"id": number, "error": {"message": text}}:
                if (answer := self._answers.pop(number, None)) and not answer.done():
                    answer.set_exception(BrowserFailed(text))
            case {"id": number, "result": result}:
                if (answer := self._answers.pop(number, None)) and not answer.done():
                    answer.set_result(result)
            case {"method": "Target.receivedMessageFromTarget", "params": {"sessionId": session, "message": message}}:
                if ear := self.ears.get(session):
                    ear(json.loads(message))
            case {"method": "Target.targetCreated", "params": {"targetInfo": {"targetId": target}}}:
                self.pages[target] = None
            case {"method": "Target.targetDestroyed", "params": {"targetId": target}}:
                self.pages.pop(target, None)

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError):
            async for line in self._process.stderr:
                self._said.append(line.decode(errors="replace").strip())

    async def _wait(self) -> None:
        code = await self._process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what it has left of itself
        await asyncio.wait([self._tasks[1]], timeout=_WORDS)  # another process may have its standard error still open
        ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        why = f"the browser died ({ending})"
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(BrowserFailed(f"{why}: {' '.join(self._said)}"))
        self._place.remove(f"{self.name}.d")
        if not self.gone.done():
            self.gone.set_result(why)


def _described(version: dict[str, str]) -> dict[str, str]:
    """As the browser's own `/json/version` has it."""
    names = {
        "Browser": "product",
        "Protocol-Version": "protocolVersion",
        "User-Agent": "userAgent",
        "V8-Version": "jsVersion",
    }
    return {shown: version[name] for shown, name in names.items()} | {
        "WebKit-Version": f"537.36 ({version['revision']})"
    }
