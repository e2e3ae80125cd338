"""The live view of a session: what its newest page shows, as JPEG pictures. The browser draws one only when the viewer has taken the last."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from ostler.apps.browsers.driver import BrowserFailed

_APART = 0.2  # seconds between two pictures, at least
_ANSWER = 5.0  # seconds for a page to begin with its pictures
_LOOK = 1.0  # seconds between two looks for a newer page
_PICTURE = {"format": "jpeg", "quality": 50}
_SHOWN = {**_PICTURE, "maxWidth": 1280, "maxHeight": 800, "everyNthFrame": 1}


class Viewed(Protocol):
    """A browser that can be asked by CDP."""

    ears: dict[str, Callable[[dict[str, Any]], None]]
    pages: dict[str, None]  # in the order in which they were opened; the browser lists them in any
    gone: asyncio.Future[str]

    async def send(self, method: str, **params: Any) -> Any: ...


class _Cast:
    """The pictures of one page."""

    def __init__(self, browser: Viewed, target: str, session: str) -> None:
        self.target = target
        self.frames: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.shown = False
        self._browser, self._session, self._last = browser, session, 0
        browser.ears[session] = self._hear

    @classmethod
    async def start(cls, browser: Viewed, target: str) -> _Cast:
        # Without `flatten`, so that messages come through the browser's own session: the connection knows no other.
        told = await browser.send("Target.attachToTarget", targetId=target, flatten=False)
        cast = cls(browser, target, told["sessionId"])
        try:
            await cast.send("Page.startScreencast", **_SHOWN)
        except BaseException:
            browser.ears.pop(told["sessionId"], None)
            raise
        return cast

    async def send(self, method: str, **params: Any) -> None:
        self._last += 1
        message = json.dumps({"id": self._last, "method": method, "params": params})
        await self._browser.send("Target.sendMessageToTarget", sessionId=self._session, message=message)

    async def stop(self) -> None:
        self._browser.ears.pop(self._session, None)
        with contextlib.suppress(BrowserFailed):  # the page may be gone
            await self._browser.send("Target.detachFromTarget", sessionId=self._session)

    def _hear(self, said: dict[str, Any]) -> None:
        if said.get("method") == "Page.screencastFrame":
            self.frames.put_nowait(said["params"])  # few: the browser waits for each to be acknowledged
        elif "data" in said.get("result", {}):  # a picture that was asked for, which needs no acknowledgement
            self.frames.put_nowait({"data": said["result"]["data"], "sessionId": None})


async def frames(browser: Viewed, contexts: Callable[[], set[str] | None]) -> AsyncIterator[bytes]:
    """Pictures of the newest page in those contexts (None: in any), until the browser is gone."""
    cast: _Cast | None = None
    looked = 0.0
    try:
        while not browser.gone.done():
            if time.monotonic() - looked >= _LOOK:
                looked = time.monotonic()
                cast = await _newest(browser, contexts(), cast)
            frame = await _next(cast)
            if cast is None:
                continue
            if frame is None:
                if not cast.shown:  # a page that does not change may send no first picture by itself
                    with contextlib.suppress(BrowserFailed):
                        await cast.send("Page.captureScreenshot", **_PICTURE)
                continue
            cast.shown = True
            yield base64.b64decode(frame["data"])
            await asyncio.sleep(_APART)
            if frame["sessionId"] is not None:
                with contextlib.suppress(BrowserFailed):  # the page may have been closed meanwhile
                    await cast.send("Page.screencastFrameAck", sessionId=frame["sessionId"])
    finally:
        if cast is not None:
            await cast.stop()


async def _newest(browser: Viewed, contexts: set[str] | None, cast: _Cast | None) -> _Cast | None:
    """The cast of the newest page: the one that runs, or another instead of it."""
    found = (await browser.send("Target.getTargets"))["targetInfos"]
    pages = [t for t in found if t["type"] == "page" and (contexts is None or t.get("browserContextId") in contexts)]
    ids = {t["targetId"] for t in pages}
    newest = next((page for page in reversed(browser.pages) if page in ids), None)
    if cast is not None and cast.target == newest:
        return cast
    if cast is not None:
        await cast.stop()
    # Closed between the two questions, or too busy: the next look tries again.
    with contextlib.suppress(BrowserFailed, TimeoutError):
        async with asyncio.timeout(_ANSWER):
            return await _Cast.start(browser, newest) if newest else None
    return None


async def _next(cast: _Cast | None) -> dict[str, Any] | None:
    if cast is None:
        await asyncio.sleep(_APART)
        return None
    try:
        async with asyncio.timeout(_LOOK):
            return await cast.frames.get()
    except TimeoutError:
        return None
