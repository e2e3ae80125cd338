"""The body of a request: read up to a limit, and dropped where the answer does not wait for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.requests import ClientDisconnect

from ostler.errors import OstlerError

_LINGER = 30.0  # seconds that a refused body is read and dropped


async def read(request: Request, limit: int, refusal: OstlerError) -> bytes:
    """The whole body; raises the refusal as soon as it is larger than the limit."""
    data, stream = bytearray(), request.stream()
    async for chunk in stream:
        data += chunk
        if len(data) > limit:
            await drop(request, stream)
            raise refusal
    return bytes(data)


async def drop(request: Request, stream: AsyncIterator[bytes]) -> None:
    """Read the rest of a refused body, for a bounded time, where the connection is closed after the answer.

    A socket that is closed with unread bytes in it is reset, and the client would see that instead of the answer. On a
    connection that stays open the server drops the rest by itself.
    """
    closes = request.headers.get("connection", "").lower() == "close" or request.scope.get("http_version") == "1.0"
    if not closes or request.headers.get("expect", "").lower() == "100-continue":
        return
    with contextlib.suppress(ClientDisconnect, TimeoutError):
        async with asyncio.timeout(_LINGER):
            async for _ in stream:
                pass
