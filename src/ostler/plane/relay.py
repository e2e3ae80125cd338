"""The two handshakes of a session: what a client asks for, what its worker is asked, and what the client is answered."""

from __future__ import annotations

import asyncio
import json
import re
from base64 import b64encode
from dataclasses import dataclass
from hashlib import sha1
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlencode

from ostler.config import PRIORITIES
from ostler.plane.access import BY, COOKIE, OWNER, SESSIONS, Caller, host_name
from ostler.plane.entry import error_headers
from ostler.plane.exchange import OWN
from ostler.plane.plan import Reply
from ostler.plane.request import HELD, Request
from ostler.plane.upstream import TCP
from ostler.sessions.slots import Group

if TYPE_CHECKING:
    from ostler.plane.session import Session

LONGEST_KEY = 100  # characters of a key under which a client comes back
OURS = frozenset({"token", "priority", "wait", "session", "ticket"})  # query parameters that no worker sees
SESSION = b"x-ostler-session"
LEASE = b"x-ostler-lease"  # a slot that another node has kept
CLIENT = b"x-ostler-from"  # the client's address, told by the node that passes it on
_NOT_FOR_WORKERS = OWN | {b"host", b"origin", b"authorization", b"expect", BY, LEASE, OWNER, CLIENT, SESSION}
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of RFC 6455
_PATH = "/:@!$&'()*+,;=~-._"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client asks for, read and checked."""

    name: str  # as it wrote it
    caller: Caller
    rest: str  # of its path
    query: str  # what is not ours
    priority: int
    wait: float
    version: str | None
    pool: str | None  # only workers of this one
    key: str | None
    client: str
    agent: str
    may_redirect: bool

    def about(self, session: Session) -> dict[str, Any]:
        """For the node."""
        return {
            "pool": session.worker.pool if session.worker else self.name,
            "owner": self.caller.owner,
            "priority": self.priority,
            "client": self.client,
            "agent": self.agent,
            "waited_ms": int(session.waited * 1000),
            "key": self.key,
            "via": self.caller.via,
            "path": self.rest or "/",
            "redirect": self.may_redirect,
        }

    def target(self, path: str) -> str:
        """Where the worker is asked."""
        joined = (path.rstrip("/") + self.rest if self.rest else path) or "/"
        return f"{joined}?{self.query}" if self.query else joined

    def handshake(self, request: Request, path: str, session: str) -> bytes:
        """The client's own handshake, as a worker on this machine may see it."""
        return self._head(request, self.target(path), [(SESSION, session)])

    def passed_on(self, request: Request, secret: str, own: str, lease: str) -> bytes:
        """The client's own handshake, as another node may see it."""
        ours = {"priority": str(self.priority), "wait": "0"} | ({"session": self.key} if self.key else {})
        target = f"{SESSIONS}{quote(self.name, safe='')}{self.rest}?{urlencode(ours)}"
        told = [(b"authorization", f"Bearer {secret}"), (BY, own), (OWNER, self.caller.owner), (CLIENT, self.client)]
        told += [(LEASE, lease)] if lease else []
        return self._head(request, f"{target}&{self.query}" if self.query else target, told)

    def _head(self, request: Request, target: str, told: list[tuple[bytes, str]]) -> bytes:
        lines = [f"GET {target} HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: ".encode()]
        lines += (request.protocol, b"\r\n")
        for name, said in told:
            lines += (name, b": ", said.encode(), b"\r\n")
        for name, value in request.headers:
            kept = _foreign_cookies(value) if name == b"cookie" else value
            if name not in _NOT_FOR_WORKERS and (kept or name != b"cookie"):
                lines += (name, b": ", kept, b"\r\n")
        return b"".join(lines)

    def redirect(self, request: Request, session: str, door: int, ticket: str) -> Reply:
        """Where the client itself reaches the worker: its door, which knows the worker's own path."""
        host = host_name((request.get(b"host") or b"").decode("latin-1")) or "localhost"
        shown = f"[{host}]" if ":" in host else host
        target = self.target("/")
        location = f"ws://{shown}:{door}{target}{'&' if '?' in target else '?'}{urlencode({'ticket': ticket})}"
        return Reply(307, {"location": location, SESSION.decode(): session, "cache-control": "no-store"})


def read_wish(request: Request, name: str, rest: str, caller: Caller, group: Group, pool: str | None) -> Wish | Reply:
    """What the client asks for, or what is wrong with it."""
    pairs = parse_qsl(request.query.decode("latin-1"), keep_blank_values=True)
    ours = {key: value for key, value in reversed(pairs) if key in OURS}
    agent = (request.get(b"user-agent") or b"").decode("latin-1")
    try:
        priority = int(ours.get("priority") or 0)
        wait = float(ours.get("wait") or group.wait)
        if priority not in PRIORITIES or not wait >= 0.0:
            raise ValueError
    except ValueError:
        message = (
            f"priority is a whole number from {PRIORITIES[0]} to {PRIORITIES[-1]}, and wait a number of seconds; "
            f"found priority={ours.get('priority', '')[:20]!r}, wait={ours.get('wait', '')[:20]!r}"
        )
        return refuse(400, "BAD_PARAMETER", message)
    key = ours.get("session") or None
    if key is not None and (len(key) > LONGEST_KEY or not key.isprintable()):
        return refuse(400, "BAD_PARAMETER", f"session is a text of at most {LONGEST_KEY} printable characters")
    where = request.client
    told = request.get(CLIENT) if caller.via else None
    return Wish(
        name=name,
        caller=caller,
        rest="" if rest in ("", "/") else quote(rest, safe=_PATH),
        query=urlencode([(k, v) for k, v in pairs if k not in OURS]),
        priority=min(priority, caller.priority),
        wait=min(wait, group.wait),
        version=client_version(agent, group),
        pool=pool,
        key=key,
        client=told.decode("latin-1")[:100] if told else f"{where[0]}:{where[1]}" if where else "",
        agent=agent[:200],
        may_redirect=caller.via is None and any(terms.get("redirect") for terms in group.pools.values()),
    )


def client_version(agent: str, group: Group) -> str | None:
    """The version in a User-Agent of the product that the pools serve; None: it is no such client, and any worker will do."""
    for product in {str(terms.get("product") or "") for terms in group.pools.values()} - {""}:
        if found := re.search(rf"(?:^|\s){re.escape(product)}/(\d{{1,9}}(?:\.\d{{1,9}}){{0,5}})", agent):
            return found[1]
    return None


def switching_raw(request: Request, session: str) -> bytes:
    """A 101 of our own, where the worker speaks plain TCP."""
    lines = [b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: ", request.protocol, b"\r\n"]
    if request.protocol == b"websocket":
        key = request.get(b"sec-websocket-key") or b""
        lines += [b"sec-websocket-accept: ", b64encode(sha1(key + _GUID, usedforsecurity=False).digest()), b"\r\n"]
        if b"binary" in (request.get(b"sec-websocket-protocol") or b"").replace(b" ", b"").split(b","):
            lines.append(b"sec-websocket-protocol: binary\r\n")
    return b"".join([*lines, SESSION, b": ", session.encode(), b"\r\n\r\n"])


class Early(asyncio.Protocol):
    """Holds what a worker says before it has a client."""

    def __init__(self) -> None:
        self.data = b""
        self._transport: asyncio.Transport = None  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        if len(self.data) > HELD:
            self._transport.pause_reading()

    def release(self) -> None:
        """Somebody else takes what comes next."""
        if len(self.data) > HELD:
            self._transport.resume_reading()


async def dial(address: str, patience: float) -> tuple[asyncio.Transport, Early]:
    """A connection to a worker that speaks plain TCP. Raises OSError (a TimeoutError is one)."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(patience):
        if address.startswith(TCP):
            host, _, port = address[len(TCP) :].rpartition(":")
            return await loop.create_connection(Early, host or "127.0.0.1", int(port))
        return await loop.create_unix_connection(Early, address)


def refuse(status: int, code: str, message: str, *, retry: float | None = None, **more: object) -> Reply:
    """An error with more than a code and a message in it."""
    told = {name: value for name, value in more.items() if value is not None}
    headers = error_headers(status, {} if retry is None else {"retry-after": str(max(1, round(retry)))})
    return Reply(status, headers, json.dumps({"error": {"code": code, "message": message, **told}}).encode())


def _foreign_cookies(line: bytes) -> bytes:
    """A Cookie header without ours."""
    pairs = (pair.strip() for pair in line.split(b";"))
    return b"; ".join(pair for pair in pairs if pair and not pair.startswith(COOKIE.encode() + b"="))
