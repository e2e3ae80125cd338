"""`ostler demo browsers`: pages through the grid by the stock Playwright client, a worker recycled meanwhile, a browser killed."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ostler.cli import client
from ostler.config import Settings
from ostler.errors import ConfigError, OstlerError
from ostler.lifecycle import family

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserType

TARGET = "ostler.apps.browsers"
POOL = "chromium"
_SESSIONS, _AT_ONCE = 12, 3
_RECYCLED = 4  # after so many sessions
_PATIENCE = 60.0
_PAGE = """<!doctype html><title>page {n}</title><body style="background:hsl({hue} 60% 35%);color:white;font:28px sans-serif;padding:2em">
<h1>page {n}</h1><button onclick="this.textContent = 'clicked ' + (navigator.userAgent.match(/Chrome.[0-9]+/) || [''])[0]">click</button>"""


def prepare() -> dict[str, str]:
    """See that there are browsers and a client; the variables for the node."""
    from ostler.apps.browsers import installed  # noqa: PLC0415

    installed.get(POOL)
    installed.driver()
    return {"OSTLER_BROWSERS_POOLS": POOL, "OSTLER_POOLS": f"{POOL}=2"}


def run(known: Settings, url: str, folder: Path) -> None:
    """The story; raises SystemExit when it does not end well."""
    pictures = (folder / "screenshots").absolute()
    pictures.mkdir()
    with _site() as site:
        asyncio.run(_Story(known, url, site, pictures).run())


@contextlib.contextmanager
def _site() -> Iterator[str]:
    """Some pages on loopback: nothing outside is opened."""

    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            number = int("".join(filter(str.isdigit, self.path)) or 0)
            body = _PAGE.format(n=number, hue=number * 29 % 360).encode()
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


class _Story:
    def __init__(self, known: Settings, url: str, site: str, pictures: Path) -> None:
        self._known, self._site, self._pictures = known, site, pictures
        self._address = f"{url.replace('http', 'ws', 1)}/sessions/{POOL}"
        self._headers = {"authorization": f"Bearer {known.token}"} if known.token else {}
        self._done = self._failed = 0

    async def run(self) -> None:
        from playwright.async_api import async_playwright  # noqa: PLC0415

        async with async_playwright() as playwright:
            print(f"\n1. {_SESSIONS} sessions at {self._address}, {_AT_ONCE} at once; a worker is recycled meanwhile")
            numbers = iter(range(1, _SESSIONS + 1))
            recycling = asyncio.create_task(self._recycle())
            await asyncio.gather(*(self._client(playwright.chromium, numbers) for _ in range(_AT_ONCE)))
            await recycling
            print("\n2. kill -9 of a browser in the middle of a session")
            await self._kill(playwright.chromium)
            print("\n3. the next session")
            await self._client(playwright.chromium, iter([_SESSIONS + 1]))
        print(
            f"\n{self._done} sessions served, {self._failed} failed, 1 cut off by kill -9 and told so. Screenshots: {self._pictures}"
        )
        if self._failed:
            raise SystemExit(1)

    async def _client(self, chromium: BrowserType, numbers: Iterator[int]) -> None:
        for number in numbers:
            try:
                await self._session(chromium, number)
                self._done += 1
            except Exception as error:
                self._failed += 1
                print(f"  session {number:>2} failed: {error}")

    async def _session(self, chromium: BrowserType, number: int) -> None:
        began = time.monotonic()
        browser = await self._connect(chromium)
        connected = time.monotonic()
        page = await browser.new_page(viewport={"width": 640, "height": 360})
        await page.goto(f"{self._site}/{number}")
        await page.click("button")
        picture = self._pictures / f"page-{number:02}.png"
        size = len(await page.screenshot(path=picture))
        await browser.close()
        spent = (time.monotonic() - began) * 1000
        print(
            f"  session {number:>2}: connected in {(connected - began) * 1000:>3.0f} ms, {spent:>4.0f} ms in all, {picture.name} {size / 1000:.0f} kB"
        )

    async def _connect(self, chromium: BrowserType) -> Browser:
        return await chromium.connect(self._address, headers=self._headers)

    async def _recycle(self) -> None:
        """As an operator would: a fresh worker takes the place of the first one."""
        await _until(lambda: self._done >= _RECYCLED or self._failed, f"{_RECYCLED} sessions")
        before = (await self._workers())[0]
        name = before["component"]
        await asyncio.to_thread(client.request, self._known, "POST", f"/api/v1/workers/{name}/restart")
        print(
            f"  --> {name} (pid {before['pid']}) is recycled: it finishes its sessions, then a fresh one takes its place"
        )
        began = time.monotonic()
        while True:
            now = (await self._workers())[0]
            if now["generation"] > before["generation"] and now["status"] == "healthy":
                break
            if time.monotonic() - began > _PATIENCE:
                raise ConfigError(f"{name} was not recycled within {_PATIENCE:g} s; see node.log")
            await asyncio.sleep(0.05)
        print(
            f"  --> {name} is back after {time.monotonic() - began:.1f} s (pid {now['pid']}, generation {now['generation']})"
        )

    async def _kill(self, chromium: BrowserType) -> None:
        browser = await self._connect(chromium)
        page = await browser.new_page()
        await page.goto(f"{self._site}/0", wait_until="commit")
        waiting = asyncio.create_task(page.evaluate("new Promise(() => {})"))
        await asyncio.sleep(0.1)
        killed = time.monotonic()
        for pid in await asyncio.to_thread(self._browsers):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                print(f"  --> kill -9 {pid}")
        try:
            async with asyncio.timeout(_PATIENCE):
                await waiting
        except Exception as error:
            print(
                f"  its client was told {(time.monotonic() - killed) * 1000:.0f} ms later: {str(error).splitlines()[0]}"
            )
            return
        print("  its client was told nothing", file=sys.stderr)
        raise SystemExit(1)

    def _browsers(self) -> list[int]:
        """The browser of the session that is open: below a driver, without a type of its own."""
        live = client.request(self._known, "GET", "/api/v1/sessions?state=live")["sessions"]
        busy = {session["worker"] for session in live}
        found = client.request(self._known, "GET", "/api/v1/workers")["workers"]
        workers = {worker["pid"] for worker in found if worker["component"] in busy}
        parents = {seen.pid: seen.parent for seen in family.processes()}
        return [
            pid for pid, parent in parents.items() if parents.get(parent) in workers and b"--type=" not in _line(pid)
        ]

    async def _workers(self) -> list[dict[str, Any]]:
        with contextlib.suppress(OstlerError):
            found = await asyncio.to_thread(client.request, self._known, "GET", "/api/v1/workers")
            return sorted((w for w in found["workers"] if w["pool"] == POOL), key=lambda w: str(w["component"]))
        return []


def _line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


async def _until(found: Any, what: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not found():
        if time.monotonic() > deadline:
            raise ConfigError(f"gave up after waiting {_PATIENCE:g} s for {what}; see node.log")
        await asyncio.sleep(0.02)
