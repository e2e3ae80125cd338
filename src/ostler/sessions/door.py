"""The worker's own door, for pools that redirect: clients come with a ticket that is good once, and are connected to the endpoint.

The data plane has admitted the session and given the ticket; bytes do not go through it. Standard library alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from ostler.sessions.lending import Lenders
from ostler.sessions.spec import Endpoint
from ostler.sessions.splice import Limits, Splice

_HEAD = 16_384  # bytes of a request's or an answer's head
_PATIENCE = 5.0  # seconds for either
TICKET = 10.0  # seconds for which a ticket is good
_NOT_FOR_WORKERS = {"", "host", "origin", "authorization", "cookie", "x-ostler-session"}


class _Ticket(NamedTuple):
    session: str
    endpoint: Endpoint
    until: float


class Door:
    """Takes connections on a TCP port. `say` tells the node of sessions that begin and end."""

    def __init__(self, host: str, limits: Limits, say: Callable[..., None]) -> None:
        self._host, self._limits, self._say = host, limits, say
        self._tickets: dict[str, _Ticket] = {}
        self._live: dict[str, Splice] = {}
        self._entering: dict[
            str, tuple[str, str] | None
        ] = {}  # sessions whose client is being connected, and why they are over
        self._held: dict[str, tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = {}
        self._server: asyncio.Server | None = None
        self._lenders = Lenders()

    async def start(self) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._knock, self._host, 0, limit=_HEAD)
        return int(self._server.sockets[0].getsockname()[1])

    def stop(self, reason: str = "shutdown", text: str = "the worker has stopped", code: int = 1001) -> None:
        if self._server is not None:
            self._server.close()
        for splice in [*self._live.values()]:
            splice.finish(reason, f"ostler: {text}", code)

    def expect(self, ticket: str, session: str, endpoint: Endpoint) -> None:
        """A client of that session may come with this ticket, once."""
        now = time.monotonic()
        self._tickets = {t: known for t, known in self._tickets.items() if known.until > now}
        self._tickets[ticket] = _Ticket(session, endpoint, now + TICKET)

    def end(self, session: str, reason: str, text: str) -> None:
        """The session is over for the node: its ticket is worth nothing, and its client is told."""
        self._tickets = {t: known for t, known in self._tickets.items() if known.session != session}
        if session in self._entering:
            self._entering[session] = (reason, text)
        elif (splice := self._live.get(session)) is not None:
            splice.finish(reason, text, 1008 if reason == "killed" else 1001)

    def facts(self) -> dict[str, list[float]]:
        """Bytes of the sessions that are here. Also from another thread, while they come and go."""
        live = [*self._live.items()]
        return {s: [splice.bytes_in, splice.bytes_out, round(splice.idle, 1)] for s, splice in live}

    async def _knock(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_PATIENCE):
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            await self._enter(head, reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            writer.close()

    async def _enter(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = head.split("\r\n")
        if any(line[:1].isspace() for line in lines):
            raise ValueError("a header in several lines")
        method, target, _ = first.split(" ", 2)
        parts = urlsplit(target)
        pairs = [pair for pair in parts.query.split("&") if pair]
        given = next((pair[7:] for pair in pairs if pair.startswith("ticket=")), "")
        known = self._tickets.pop(given, None)
        if known is None or known.until <= time.monotonic() or method != "GET":
            _refuse(
                writer, "TICKET", "this ticket is not known, was used already or is too old: connect to the node again"
            )
            return
        query = "&".join(pair for pair in pairs if not pair.startswith("ticket="))
        path = joined(known.endpoint.path, parts.path, query)
        self._entering[known.session] = None
        try:
            async with asyncio.timeout(_PATIENCE):
                await self._connect(known, path, lines, reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            text = f"the worker's endpoint could not be reached ({type(error).__name__})"
            self._say("over", known.session, "worker-lost", {"text": f"ostler: {text}", "code": 1011})
            _refuse(writer, "NO_WORKER", f"{text}: connect to the node again", "502 Bad Gateway")
        over = self._entering.pop(known.session, None)
        if over is not None:  # the node had it ended meanwhile
            self.end(known.session, *over)

    async def _connect(
        self,
        known: _Ticket,
        path: str,
        lines: list[str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        inner, outer = await self._dial(known.endpoint)
        try:
            kept = [line for line in lines if line.partition(":")[0].strip().lower() not in _NOT_FOR_WORKERS]
            first = [f"GET {path} HTTP/1.1", "host: localhost", f"x-ostler-session: {known.session}"]
            outer.write("\r\n".join([*first, *kept, "", ""]).encode("latin-1"))
            answer = await inner.readuntil(b"\r\n\r\n")
        except BaseException:
            outer.close()
            raise
        if writer.is_closing() or reader._eof:  # type: ignore[attr-defined]  # noqa: SLF001
            outer.close()
            writer.close()
            self._say("over", known.session, "client", {"text": "the client left during the handshake", "code": 1006})
            return
        writer.write(answer)
        if not answer.startswith(b"HTTP/1.1 101"):
            outer.close()
            writer.close()
            self._say("over", known.session, "refused", {"text": "the worker refused the handshake"})
            return
        self._begin(known.session, (reader, writer), (inner, outer), known.endpoint.lends)

    async def _dial(self, endpoint: Endpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = endpoint.address
        if address.startswith("tcp:"):
            host, _, port = address[4:].rpartition(":")
            return await asyncio.open_connection(host or "127.0.0.1", int(port), limit=_HEAD)
        return await asyncio.open_unix_connection(address, limit=_HEAD)

    def _begin(
        self,
        session: str,
        client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        worker: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        lends: str,
    ) -> None:
        def over(splice: Splice) -> None:
            self._live.pop(session, None)
            end = splice.end
            assert end is not None
            told: dict[str, Any] = {"text": end.text, "code": end.code}
            self._say("over", session, end.reason, {**told, "bytes_in": splice.bytes_in, "bytes_out": splice.bytes_out})

        transports = [_released(*side) for side in (client, worker)]
        # A stream's writer that is not held any more closes its connection.
        self._held[session] = (client[1], worker[1])

        def gone() -> None:
            self._held.pop(session, None)

        lend = self._lenders.way(lends, session) if lends else None
        splice = Splice(transports[0][0], transports[1][0], self._limits, over, gone, lend=lend)
        self._live[session] = splice
        self._say("began", session)
        splice.start(transports[1][1], transports[0][1])


def _released(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[asyncio.Transport, bytes]:
    """The connection itself, and what was read ahead."""
    transport: Any = writer.transport
    early = bytes(reader._buffer)  # type: ignore[attr-defined]  # noqa: SLF001
    reader._buffer.clear()  # type: ignore[attr-defined]  # noqa: SLF001
    with contextlib.suppress(RuntimeError):
        transport.resume_reading()
    return transport, early


def joined(base: str, rest: str, query: str) -> str:
    """Where the worker takes it: its own path, then what the client asked for behind the pool's name."""
    path = base.rstrip("/") + rest if rest not in ("", "/") else base
    return f"{path}?{query}" if query else path


def _refuse(writer: asyncio.StreamWriter, code: str, message: str, status: str = "403 Forbidden") -> None:
    body = json.dumps({"error": {"code": code, "message": message}}).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    writer.close()
