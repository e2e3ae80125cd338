"""One request on its way: what its client asked, what becomes of it (see plan.py), and the answer as it goes back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ostler.plane.access import CLIENT_HEADER, PEER_HEADER
from ostler.plane.entry import STATUS_LINES, error_body, error_headers
from ostler.plane.heads import Seen
from ostler.plane.plan import Forward, Peek, Plan, Refuse, Relay, Reply, Serve
from ostler.plane.upstream import HOP, Head, Headers, Link

if TYPE_CHECKING:
    from ostler.plane.proxy import Client

log = logging.getLogger("ostler.plane")

HELD = 262_144  # bytes of a body that wait for the one who takes it; then the client is not read any more
# Never passed on as they are: what is about one connection alone, what frames the body, and what only the plane may say.
OWN = HOP | {b"content-length", PEER_HEADER, CLIENT_HEADER}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


_INTERNAL = Refuse(500, "INTERNAL", "something went wrong inside the node; its log has the details")


def _shaped(_status: int, code: str, message: str) -> bytes:
    return error_body(code, message)


class Request:
    """One request and its answer. Also the sink of the link that it is forwarded on."""

    # What most requests never change is the class's: a request costs what it sets.
    method = path = version = ""
    target = query = b""
    protocol = b""  # another one that it asks for
    length: int | None = None
    chunked = expects = upgrades = bodiless = False
    keep = True  # the connection stays open after the answer
    is_whole = False  # all of the body is here
    is_sent = False  # … and was handed over
    is_over = False  # it is answered, or its client has gone
    received = 0  # bytes of its body so far
    sent = 0  # bytes of the upstream's answer so far, without its head
    status = 0  # of its answer, once that has begun
    gone: Callable[[Request], None] | None = None
    """Called when the client goes away while no plan runs: set it before you return None from a route."""
    inner = b"/infer"  # where a worker takes it
    seen: Seen | None = None  # its head came before
    passes = True  # an answer that is whole in one read is taken as it is
    _first: dict[bytes, bytes] | None = None
    tells: Callable[[int, str, str], bytes] = staticmethod(_shaped)
    """The body of an error (status, code, message), for routes whose clients expect another shape."""
    _switch: Head | None = None  # a 101 that makes a session of the connection
    _plan: Plan = None
    _peek: Peek | None = None
    _link: Link | None = None
    _held_size = 0
    _replay = b""  # a small body that was sent, for another try
    _sent_head = _answered = _chunked = _sse = _retried = _is_lost = False
    _task: asyncio.Task[None] | None = None
    _news: asyncio.Event | None = None

    def __init__(self, client: Client) -> None:
        self._client = client
        self.headers: Headers = []  # names in lower case; the length of its body is `length` alone
        self._held: list[bytes] = []
        self._out: list[bytes] = []

    # ---- what is known of it

    @property
    def peer(self) -> int | None:
        """The user whose process has connected, where the system tells."""
        return self._client.peer

    @property
    def client(self) -> tuple[str, int] | None:
        """The client's address."""
        return self._client.address

    def get(self, name: bytes) -> bytes | None:
        """The first header of that name (in lower case)."""
        if self._first is None:
            self._first = dict(reversed(self.headers))
        return self._first.get(name)

    def head_fields(self) -> dict[str, Any]:
        """What its head says, for `repeat`."""
        self.get(b"")
        names = ("method", "path", "version", "target", "query", "bodiless", "headers", "_first")
        return {name: getattr(self, name) for name in names}

    @property
    def is_plain(self) -> bool:
        """Whether it is here as a whole, and another one with this head is no different but for its body."""
        return self.is_whole and self.keep and not (self.chunked or self.upgrades or self.get(b"expect"))

    def repeat(self, seen: Seen, body: bytes) -> None:
        """It has a head that came before, and all of its body."""
        self.__dict__.update(seen.fields)
        self.seen, self.is_whole = seen, True
        self.length = self.received = self._held_size = len(body)
        self._held = [body]

    def frame(self, name: bytes, value: bytes) -> None:
        """A header that says how its body comes."""
        if name == b"transfer-encoding":
            self.chunked = True
        else:
            self.expects = value.lower() == b"100-continue"

    @property
    def streamed(self) -> bool:
        """Whether its answer goes out as it comes, with a length that nobody knew."""
        return self._sse or self._chunked

    @property
    def is_repeatable(self) -> bool:
        """Whether all of the body that was received is still here: the request can be sent once more."""
        return not self._is_lost

    def begun(self) -> bytes:
        """What is here of the body and was not handed over."""
        if len(self._held) > 1:
            self._held[:] = [b"".join(self._held)]
        return self._held[0] if self._held else b""

    # ---- plans

    def begin(self, route: Callable[[Request], Plan]) -> None:
        """Its head is here: ask what is to be done."""
        self.go(self._told(route, self))

    def go(self, plan: Plan) -> None:
        """Do this with the request; nothing when its client has gone meanwhile."""
        if self.is_over:
            return
        self._plan = plan
        if isinstance(plan, Forward):
            self._forward(plan)
        elif isinstance(plan, Peek):
            self._peek = plan
            self._ask_for_body()
            self.push()
        elif isinstance(plan, Reply):
            self.reply(plan.status, plan.headers, plan.body)
        elif isinstance(plan, Refuse):
            self.refuse(plan.status, plan.code, plan.message, plan.headers)
        elif isinstance(plan, Serve):
            self._task = asyncio.get_running_loop().create_task(self._serve(plan))

    def push(self) -> None:
        """Hand on what is here of the body; the connection calls it after each read."""
        if self._link is not None:
            self._send(self._link)
        elif self._peek is not None:
            if self.is_whole or self._held_size >= self._peek.size:
                peek, self._peek = self._peek, None
                self.go(self._told(peek.then, self))
        elif self._news is not None:
            self._news.set()
        if self._held_size > HELD and self._link is None and self._peek is None:
            self._client.pause()

    def take(self, data: bytes) -> None:
        """A piece of the body came."""
        self.received += len(data)
        plan = self._plan
        if isinstance(plan, Forward) and plan.max_body is not None and self.received > plan.max_body:
            self._refuse_body(plan.max_body)
        if self.is_over:
            self._client.drop(len(data))
            return
        self._held.append(data)
        self._held_size += len(data)

    def _refuse_body(self, limit: int) -> None:
        if self.is_over:
            return
        self._drop_link("refused")
        if self._answered:
            self.is_over = True
            self._client.cut()
            return
        self.refuse(413, "PAYLOAD_TOO_LARGE", f"the body may have {limit} bytes, found more")

    def _ask_for_body(self) -> None:
        """Answer an `Expect: 100-continue`, once."""
        if self.expects:
            self.expects = False
            if not self.is_whole and not self._answered:
                self._client.write(_CONTINUE)

    def _drop_link(self, how: str) -> None:
        link, self._link = self._link, None
        plan = self._plan
        if isinstance(plan, Forward):
            self._plan = None
            if link is not None and plan.lingers:
                link.hang_up(lambda: self._end(plan, how))
                if plan.left is not None:
                    self._told(plan.left, self)
                return
        if link is not None:
            if self._client.is_tunnel:
                link.close()
            else:
                link.abort()
        if isinstance(plan, Forward):
            self._end(plan, how)

    def _end(self, plan: Forward, how: str) -> None:
        if plan.ended is not None:
            self._told(plan.ended, self, how)

    def _told(self, callback: Callable[..., Any], *what: object) -> Any:
        """What a callback says. One that raises ends its own request alone."""
        try:
            return callback(*what)
        except Exception:
            log.exception("%s %s failed", self.method, self.path)
            return _INTERNAL

    # ---- forwarding

    def _forward(self, plan: Forward) -> None:
        if plan.max_body is not None and max(self.length or 0, self.received) > plan.max_body:
            self._refuse_body(plan.max_body)
            return
        self._sent_head = self.is_sent = False
        link = plan.upstream.take()
        if link is None:
            plan.upstream.connect(lambda found: self._connected(plan, found))
            return
        self._link = link
        if not self._client.is_reading:  # else at the end of this read, with what it brought of the body
            self._client.resume()
            self._send(link)

    def _connected(self, plan: Forward, found: Link | OSError) -> None:
        if self.is_over or self._plan is not plan:
            if isinstance(found, Link):
                found.upstream.give(found)
        elif isinstance(found, OSError):
            self._fail(f"cannot connect: {found.strerror or found}", sent=False)
        else:
            self._link = found
            self._client.resume()
            self._send(found)

    def _send(self, link: Link) -> None:
        if self._sent_head:
            if self._held:
                data = self.begun()
                link.write(b"%x\r\n%b\r\n" % (len(data), data) if self.length is None else data)
                self._taken()
            if self.is_whole and not self.is_sent:
                self.is_sent = True
                if self.length is None:
                    link.write(b"0\r\n\r\n")
            return
        plan = self._plan
        assert isinstance(plan, Forward)
        body, rewritten = self.begun(), plan.head
        if rewritten is not None:
            self._ask_for_body()
        head = self._same_head() if rewritten is None else rewritten
        if self.is_whole:
            self.is_sent, self._replay = True, body
            head += (
                b"content-length: %d\r\n\r\n" % len(body) if body or self.method not in ("GET", "HEAD") else b"\r\n"
            ) + body
        elif self.length is not None:
            self._is_lost = True
            head += b"content-length: %d\r\n\r\n%b" % (self.length, body)
        else:
            self._is_lost = True
            head += b"transfer-encoding: chunked\r\n\r\n" + (b"%x\r\n%b\r\n" % (len(body), body) if body else b"")
        self._sent_head = True
        self._taken()
        link.begin(self, head)

    def _taken(self) -> None:
        self._held.clear()
        self._held_size = 0

    def _same_head(self) -> bytes:
        out = [self.method.encode(), b" ", self.target, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name in OWN or (name == b"expect" and not self.expects):
                continue
            out += (name, b": ", value, b"\r\n")
        if self.upgrades:
            out += (b"connection: upgrade\r\nupgrade: ", self.get(b"upgrade") or b"", b"\r\n")
        out.append(self._client.introduction)
        return b"".join(out)

    # ---- the sink of the link

    def informed(self, status: int) -> None:
        if status == 100:
            self._ask_for_body()

    def answered(self, head: Head) -> None:
        client, plan = self._client, self._plan
        if isinstance(plan, Relay) and self._is_taken_over(plan, head):
            return
        self._answered, self.status = True, head.status
        if head.status == 101:
            client.tunnel(self._link)
            self._out += [
                b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: ",
                head.upgrade,
                b"\r\n",
            ]
            self._out += [part for n, v in head.headers for part in (n, b": ", v, b"\r\n")]
            self._out.append(b"\r\n")
            return
        self._keep_or_not()
        out = self._out
        out.append(STATUS_LINES.get(head.status) or b"HTTP/1.1 %d \r\n" % head.status)
        for name, value in head.headers:
            out += (name, b": ", value, b"\r\n")
            if name == b"content-type":
                self._sse = value.startswith(b"text/event-stream")
        self._frame(head.length is not None, bodiless=self.bodiless or head.status in (204, 304))
        if self._sse:
            client.streams(self)

    def _is_taken_over(self, plan: Relay, head: Head) -> bool:
        """Whether the answer to a handshake is not for the client as it is."""
        if head.status == 101:
            self._switch = head  # what follows it in the same read comes next, and then `flush`
            return True
        instead = None if plan.declined is None else self._told(plan.declined, self, head)
        if instead is None:
            return False
        self.abandon(instead)
        return True

    def hand_over(self) -> tuple[Client, bytes]:
        """The request is over and its connection somebody else's: the client, and what it sent behind the request."""
        self.is_over = self._answered = True
        self._plan = self.gone = None
        return self._client, self._client.hand_over()

    def _keep_or_not(self) -> None:
        """Whether the connection can serve another request after this answer."""
        if self._client.is_closing or self.upgrades or (self.expects and not self.is_whole):
            self.keep = False

    def _frame(self, measured: bool, *, bodiless: bool) -> None:
        """The end of a head: how its client knows where the body ends."""
        if not measured and not bodiless:
            if self.version == "1.1":
                self._chunked = True
                self._out.append(b"transfer-encoding: chunked\r\n")
            else:
                self.keep = False
        self._out.append(b"\r\n" if self.keep else b"connection: close\r\n\r\n")

    def body(self, data: bytes) -> None:
        self.sent += len(data)
        if self._chunked:
            self._out += (b"%x\r\n" % len(data), data, b"\r\n")
        else:
            self._out.append(data)

    def whole(self, data: bytes, start: int) -> None:
        """The answer has come as a whole, and its head is as a client may have it. Its body begins at `start`."""
        self._answered, self.status, self.sent = True, 200, len(data) - start
        self._keep_or_not()
        if not self.keep:
            data = data[: start - 2] + b"connection: close\r\n\r\n" + data[start:]
        self._client.write(data)
        self.finished([])

    def flush(self) -> None:
        if self._switch is not None:
            self._do_switch()
        elif self._out:
            data = b"".join(self._out)
            self._out.clear()
            self._client.write(data)

    def _do_switch(self) -> None:
        plan, link, head = self._plan, self._link, self._switch
        assert isinstance(plan, Relay)
        self._plan = self._link = self._switch = None
        rest, self._out = b"".join(self._out), []
        self._told(plan.switched, self, head, link, rest)

    def finished(self, trailers: Headers) -> None:
        plan, self._link = self._plan, None
        self._plan = self.gone = (
            None  # they lead back here: what is over is free at once, not when garbage is collected
        )
        if self._client.is_tunnel:
            self.flush()
            self.is_over = True
            self._client.transport.close()
        else:
            self._close_body(trailers)
        if isinstance(plan, Forward):
            self._end(plan, "done")

    def _close_body(self, trailers: Headers) -> None:
        if self._chunked:
            self._out.append(b"0\r\n")
            self._out += [part for name, value in trailers for part in (name, b": ", value, b"\r\n")]
            self._out.append(b"\r\n")
        self.flush()
        self.is_over = True
        self._client.done(self)

    def failed(self, reason: str) -> None:
        link, self._link = self._link, None
        plan = self._plan
        assert isinstance(plan, Forward)
        if self._answered:
            self._plan = None
            self._break_off(reason)
            self._end(plan, "cut")
        elif link and link.used and not link.begun and not self._retried and self.method in ("GET", "HEAD"):
            self._retried = True  # it may have been closed for being idle; asking again does no harm
            self._again()
            plan.upstream.connect(lambda found: self._connected(plan, found))
        else:
            self._fail(reason, sent=True)

    def _again(self) -> None:
        """Have the body that was sent here once more."""
        self._sent_head = self.is_sent = False
        if self._replay and not self._held:
            self._held, self._held_size = [self._replay], len(self._replay)

    def _fail(self, reason: str, *, sent: bool) -> None:
        """No byte of an answer has gone to the client."""
        plan = self._plan
        assert isinstance(plan, Forward)
        self._plan = None
        if sent:
            self._again()
        refusal = Refuse(502, "BAD_UPSTREAM", f"no answer to {self.method} {self.path}: {reason}")
        instead = refusal if plan.failed is None else self._told(plan.failed, self, reason, sent)
        if isinstance(instead, Forward) and self._is_lost:
            self._end(instead, "refused")
            instead = refusal
        self.go(refusal if instead is None else instead)

    def _break_off(self, reason: str) -> None:
        """The answer has begun and will not be whole: its client must not take it for whole."""
        if self._sse:
            error = self.tells(502, "BAD_UPSTREAM", reason)
            self.body(b"event: error\ndata: " + error + b"\n\n")
        self.flush()
        self.is_over = True
        self._client.cut()

    def full(self) -> None:
        self._client.pause()

    def drained(self) -> None:
        self._client.resume()

    # ---- the client

    def client_full(self) -> None:
        """The client takes nothing: nothing more is read for it."""
        if self._link is not None:
            self._link.pause()

    def client_drained(self) -> None:
        if self._link is not None:
            self._link.resume()
        if self._news is not None:
            self._news.set()

    @property
    def stall(self) -> float | None:
        return self._plan.stall if isinstance(self._plan, Forward) else None

    @property
    def finishes(self) -> bool:
        """Whether the plane waits for its end when it is asked to stop."""
        return not (self._sse and isinstance(self._plan, Forward) and not self._plan.finishes)

    def abandon(self, plan: Plan, reason: str = "it took too long") -> None:
        """Leave the upstream to itself, and do this instead; an answer that has begun breaks off."""
        if self.is_over:
            return
        self._drop_link("late")
        if self._answered:
            self._break_off(reason)
        else:
            self.go(plan)

    def client_left(self) -> None:
        """The client has gone: what was done for it is cancelled."""
        if self.is_over:
            return
        self.is_over = True
        if isinstance(self._plan, Forward):
            self._drop_link("left")
        elif self._task is not None:
            self._task.cancel()
        elif self.gone is not None:
            self.gone(self)

    # ---- answers of our own

    async def _serve(self, plan: Serve) -> None:
        self._news = asyncio.Event()
        try:
            after = await plan.handler(self)
        except asyncio.CancelledError:
            if not self.is_over:
                self.is_over = True
                self._client.cut()
            raise
        except Exception:
            log.exception("%s %s failed", self.method, self.path)
            self._news = self._task = None
            if self._answered:
                self._break_off("something went wrong inside the node; its log has the details")
            else:
                self.go(_INTERNAL)
            return
        self._news = self._task = None
        if after is not None:
            self.go(after)
        elif not self.is_over and self._answered:
            self.finish()

    async def read(self, limit: int) -> bytes:
        """The whole body; answers 413 and raises CancelledError when it is larger."""
        self._ask_for_body()
        while not self.is_whole:
            await self._wait()
            if self._held_size > limit:
                break
            self._client.resume()
        if self._held_size > limit:
            self.refuse(413, "PAYLOAD_TOO_LARGE", f"the body may have {limit} bytes, found more")
            raise asyncio.CancelledError
        return self.begun()

    async def peek(self, size: int = 65_536) -> bytes:
        """The first bytes of the body, when so many are here or all."""
        self._ask_for_body()
        while not self.is_whole and self._held_size < min(size, HELD):
            await self._wait()
        return self.begun()

    async def _wait(self) -> None:
        assert self._news is not None
        self._news.clear()
        await self._news.wait()

    def reply(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        """The whole answer at once."""
        if self.is_over:
            return
        self.start(status, {**headers, "content-length": str(len(body))})
        if not self.bodiless:
            self._out.append(body)
        self.finish()

    def refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        """An error as the whole answer."""
        self.reply(status, error_headers(status, headers), self.tells(status, code, message))

    def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin an answer; it goes out with its first bytes, or at its end."""
        self._answered, self.status = True, status
        self._keep_or_not()
        self._out.append(STATUS_LINES[status])
        for name, value in headers.items():
            self._out.append(f"{name}: {value}\r\n".encode("latin-1"))
            self._sse = self._sse or value.startswith("text/event-stream")
        self._frame("content-length" in headers, bodiless=self.bodiless or status in (204, 304))

    async def write(self, data: bytes) -> None:
        """A piece of the answer's body; waits while the client does not take it."""
        if data and not self.bodiless and not self.is_over:
            self.body(data)
        self.flush()
        while self._client.is_full:
            await self._wait()

    def finish(self) -> None:
        """The answer is whole."""
        self._plan = self.gone = None
        if not self.is_over:
            self._close_body([])
