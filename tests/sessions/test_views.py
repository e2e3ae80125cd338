"""The live view of sessions, as a worker serves it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ostler.sessions.handle import Session
from ostler.sessions.views import _VIEWERS, Views
from tests.sessions.planes import PATIENCE


class Still:
    """A picture that never changes."""

    def __init__(self) -> None:
        self.shown = 0

    async def view(self, _: Session) -> AsyncIterator[bytes]:
        self.shown += 1
        try:
            yield b"picture"
            await asyncio.Event().wait()
        finally:
            self.shown -= 1


async def until(code: Still, shown: int) -> None:
    async with asyncio.timeout(PATIENCE):
        while code.shown != shown:
            await asyncio.sleep(0.005)


def test_a_view_ends_with_its_viewer_or_its_session_though_nothing_changes(tmp_path: Path) -> None:
    async def viewer(path: str) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(b"GET /view/s1 HTTP/1.0\r\n\r\n")
        return (await reader.readline()).split()[1], reader, writer

    async def main() -> None:
        code, sessions = Still(), {"s1": Session.of("s1", {}, lambda *_: None)}
        views = Views(code, sessions, str(tmp_path / "v"))
        path = await views.start()
        many: list[Any] = [await viewer(path) for _ in range(_VIEWERS + 1)]
        assert [status for status, *_ in many] == [b"200"] * _VIEWERS + [b"429"]
        await until(code, _VIEWERS)
        for _, _, writer in many:
            writer.close()
        await until(code, 0)
        status, reader, writer = await viewer(path)
        assert status == b"200"
        sessions.clear()
        async with asyncio.timeout(PATIENCE):
            assert (await reader.read()).count(b"picture") == 1
        await until(code, 0)
        writer.close()
        await views.stop()

    asyncio.run(main())
