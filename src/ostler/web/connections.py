"""Connections of clients. Each is an open file, and workers need some, too: clients can never take them all."""

from __future__ import annotations

import asyncio
import resource

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ostler.web.peers import Peers

PEER = "ostler.uid"  # the key of a request's scope with the user at the other end, or None

_HEAD = 30.0  # seconds until a client must have sent the head of its first request
_RESERVE = 64  # files, at the least, that are kept for the node itself; and a quarter of what it may have open


class Connection(HttpToolsProtocol):
    """Refused when only the reserve is left; closed when its client says nothing."""

    head_patience = _HEAD
    peers = Peers()
    _peer: int | None = None
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if allowed != resource.RLIM_INFINITY and len(self.connections) > allowed - max(_RESERVE, allowed // 4):
            transport.abort()
            return
        if self.client and self.server and self.server[1] is not None:
            self._peer = self.peers.uid(self.client, (self.server[0], self.server[1]))
        self._waiting = self.loop.call_later(self.head_patience, self._mute)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[PEER] = self._peer  # type: ignore[literal-required]

    def _mute(self) -> None:
        asked: object | None = self.cycle  # None before the first request, whatever its type says
        if asked is None and self in self.connections:  # nor has it become a WebSocket
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self.pipeline.clear()  # nobody is there for the answers
        super().connection_lost(exc)
