"""Connections to the node's own server: clients, or the data plane, which tells for whom it asks."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ostler.plane.access import CLIENT_HEADER, PEER_HEADER, read_client, read_peer
from ostler.plane.entry import Entry
from ostler.plane.peers import Peers

PEER = "ostler.uid"  # the key of a request's scope with the user at the other end, or None


class Connection(Entry, HttpToolsProtocol):
    """One connection, within the limits of plane/entry.py."""

    peers = Peers()
    _peer: int | None = None
    _is_plane = False  # it came over the node's own Unix socket

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        HttpToolsProtocol.connection_made(self, transport)
        if not self.enter(transport, len(self.connections)):
            return
        ours = transport.get_extra_info("socket")
        self._is_plane = ours is not None and ours.family == socket.AF_UNIX
        if self._is_plane:
            self.server = None  # its path says nothing to clients
        elif self.client and self.server and self.server[1] is not None:
            self._peer = self.peers.uid(self.client, (self.server[0], self.server[1]))

    def connection_lost(self, exc: Exception | None) -> None:
        self.exit()
        self.pipeline.clear()  # nobody is there for the answers
        HttpToolsProtocol.connection_lost(self, exc)

    def parse(self, piece: bytes) -> bool:
        """As uvicorn's own, but for our limits."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserError:
            if self._excess is not None:
                raise self._excess from None
            self.send_400_response("Invalid HTTP request received.")
            return False
        except httptools.HttpParserUpgrade:
            if self._should_upgrade():
                self.handle_websocket_upgrade()
            else:
                self._unsupported_upgrade_warning()
            return False
        return True

    def handle_websocket_upgrade(self) -> None:
        """What serves it from here on makes a scope of its own, and has only the state in common with this one."""
        self.app_state = {**self.app_state, PEER: self.scope[PEER]}  # type: ignore[literal-required]
        super().handle_websocket_upgrade()

    def is_answering(self) -> bool:
        asked: Any = self.cycle
        return asked is not None and not asked.response_complete

    def is_read(self) -> bool:
        return self.cycle is None or not self.cycle.response_complete

    def read_on(self) -> None:
        self.flow.resume_reading()

    # ---- what the parser finds

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.head_begins()
        self.scope[PEER] = self._peer  # type: ignore[literal-required]

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self.check_url(len(self.url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self.check_headers(len(self.headers))

    def on_headers_complete(self) -> None:
        self.head_ends(len(self.pipeline))
        if self._is_plane:
            self._take_over()
        super().on_headers_complete()
        if self.cycle is not None:  # None where it becomes a WebSocket
            self.cycle.transport = _Exit(self)  # type: ignore[assignment]

    def _take_over(self) -> None:
        """The data plane asks for somebody: the request comes from there. Only over our own socket is that believed."""
        said: dict[bytes, bytes] = {n: v for n, v in self.headers if n in (PEER_HEADER, CLIENT_HEADER)}
        self.headers[:] = [h for h in self.headers if h[0] not in said]
        self.scope[PEER] = read_peer(said.get(PEER_HEADER))  # type: ignore[literal-required]
        self.scope["client"] = read_client(said.get(CLIENT_HEADER))

    def on_body(self, body: bytes) -> None:
        self.body_came()
        super().on_body(body)
        if self.cycle is not None and self.cycle.response_complete:
            self.drop(len(body))

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.body_ends()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._leaving is not None:
            self._unset_keepalive_if_required()
        elif self._in_body:
            self.answered_early()


class _Exit:
    """The transport as one answer uses it: its close is the connection's `leave`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        self._connection.leave()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection.transport, name)
