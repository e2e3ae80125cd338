"""One request on its way: what its client asked, what becomes of it (see plan.py), and answers of our own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import httptools

from ostler.plane.answer import Answer, Headers
from ostler.plane.entry import error_body, error_headers
from ostler.plane.exchange import Exchange
from ostler.plane.heads import Seen
from ostler.plane.plan import Forward, Peek, Plan, Refuse, Reply, Serve

if TYPE_CHECKING:
    from ostler.plane.client import Client

log = logging.getLogger("ostler.plane")

HELD = 262_144  # bytes of a body that wait for the one who takes it; then the client is not read any more
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_INTERNAL = Refuse(500, "INTERNAL", "something went wrong inside the node; its log has the details")


def _shaped(_status: int, code: str, message: str) -> bytes:
    return error_body(code, message)


class Request:
    """One request and its answer."""

    # What most requests never change is the class's: a request costs what it sets.
    method = path = version = ""
    target = query = b""
    protocol = b""  # another one that it asks for
    length: int | None = None
    chunked = expects = upgrades = bodiless = False
    keep = True  # the connection stays open after the answer
    is_whole = False  # all of the body is here
    is_over = False  # it is answered, or its client has gone
    received = 0  # bytes of its body so far
    sent = 0  # bytes of its answer so far, without its head
    status = 0  # of its answer, once that has begun
    answer: Answer | None = None  # unless it came as a whole
    exchange: Exchange | None = None  # while it is forwarded
    replay = b""  # a small body that was sent, for another try
    is_repeatable = True  # all of the body that was received is still here: the request can be sent once more
    is_retried = False  # … as it was
    gone: Callable[[Request], None] | None = None
    """Called when the client goes away while no plan runs: set it before you return None from a route."""
    inner = b"/infer"  # where a worker takes it
    seen: Seen | None = None  # its head came before
    _first: dict[bytes, bytes] | None = None
    tells: Callable[[int, str, str], bytes] = staticmethod(_shaped)
    """The body of an error (status, code, message), for routes whose clients expect another shape."""
    _peek: Peek | None = None
    _held_size = 0
    _task: asyncio.Task[None] | None = None
    _news: asyncio.Event | None = None

    def __init__(self, client: Client) -> None:
        self._client = client
        self.headers: Headers = []  # names in lower case; the length of its body is `length` alone
        self._held: list[bytes] = []

    # ---- what is known of it

    @property
    def asker(self) -> Client:
        """The connection that it came on."""
        return self._client

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

    def read_head(self, parser: httptools.HttpRequestParser) -> None:
        """Its head is parsed, and `target` and `headers` are whole."""
        self.method = parser.get_method().decode()
        self.version = parser.get_http_version()
        self.keep = self.version == "1.1" and parser.should_keep_alive()
        self.bodiless = self.method == "HEAD"
        target = self.target
        if target.startswith(b"/"):
            path, _, query = target.partition(b"?")
            if b"#" in target:
                path, query = path.partition(b"#")[0], query.partition(b"#")[0]
        else:
            url = httptools.parse_url(target)
            path, query = url.path or b"/", url.query or b""
        self.path, self.query = path.decode("ascii"), query
        if "%" in self.path:
            self.path = unquote(self.path)
        if parser.should_upgrade():
            self.protocol = (self.get(b"upgrade") or b"").lower()
            self.upgrades = self.protocol == b"websocket"
            self.keep = False

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
        return self.answer is not None and (self.answer.is_events or self.answer.is_chunked)

    def begun(self) -> bytes:
        """What is here of the body and was not handed over."""
        if len(self._held) > 1:
            self._held[:] = [b"".join(self._held)]
        return self._held[0] if self._held else b""

    def hand_on(self) -> bytes:
        """What is here of the body; it is the caller's now."""
        data = self.begun()
        self._held.clear()
        self._held_size = 0
        return data

    def have_again(self) -> None:
        """Have the body that was handed on here once more."""
        if self.replay and not self._held:
            self._held, self._held_size = [self.replay], len(self.replay)

    # ---- plans

    def begin(self, route: Callable[[Request], Plan]) -> None:
        """Its head is here: ask what is to be done."""
        self.go(self.told(route, self))

    def go(self, plan: Plan) -> None:
        """Do this with the request; nothing when its client has gone meanwhile."""
        if self.is_over:
            return
        if isinstance(plan, Forward):
            self.exchange = Exchange(self, self._client, plan)
            self.exchange.begin()
        elif isinstance(plan, Peek):
            self._peek = plan
            self.ask_for_body()
            self.push()
        elif isinstance(plan, Reply):
            self.reply(plan.status, plan.headers, plan.body)
        elif isinstance(plan, Refuse):
            self.refuse(plan.status, plan.code, plan.message, plan.headers)
        elif isinstance(plan, Serve):
            self._task = asyncio.get_running_loop().create_task(self._serve(plan))

    def push(self) -> None:
        """Hand on what is here of the body; the connection calls it after each read."""
        if self.exchange is not None:
            self.exchange.push()
        elif self._peek is not None:
            if self.is_whole or self._held_size >= self._peek.size:
                peek, self._peek = self._peek, None
                self.go(self.told(peek.then, self))
        elif self._news is not None:
            self._news.set()
        if self._held_size > HELD and self._peek is None:
            self._client.pause()

    def take(self, data: bytes) -> None:
        """A piece of the body came."""
        self.received += len(data)
        limit = None if self.exchange is None else self.exchange.plan.max_body
        if limit is not None and self.received > limit:
            self.refuse_body(limit)
        if self.is_over:
            self._client.drop(len(data))
            return
        self._held.append(data)
        self._held_size += len(data)

    def refuse_body(self, limit: int) -> None:
        """Its body is larger than its plan allows."""
        if self.is_over:
            return
        self._drop("refused")
        if self.status:
            self.is_over = True
            self._client.cut()
            return
        self.refuse(413, "PAYLOAD_TOO_LARGE", f"the body may have {limit} bytes, found more")

    def ask_for_body(self) -> None:
        """Answer an `Expect: 100-continue`, once."""
        if self.expects:
            self.expects = False
            if not self.is_whole and not self.status:
                self._client.write(_CONTINUE)

    def _drop(self, how: str) -> None:
        if self.exchange is not None:
            self.exchange.drop(how)

    def told(self, callback: Callable[..., Any], *what: object) -> Any:
        """What a callback says. One that raises ends its own request alone."""
        try:
            return callback(*what)
        except Exception:
            log.exception("%s %s failed", self.method, self.path)
            return _INTERNAL

    def hand_over(self) -> tuple[Client, bytes]:
        """The request is over and its connection somebody else's: the client, and what it sent behind the request."""
        self.is_over, self.status = True, 101
        self.exchange = self.gone = None
        return self._client, self._client.hand_over()

    # ---- the client

    def client_full(self) -> None:
        """The client takes nothing: nothing more is read for it."""
        if self.exchange is not None and self.exchange.link is not None:
            self.exchange.link.pause()

    def client_drained(self) -> None:
        if self.exchange is not None and self.exchange.link is not None:
            self.exchange.link.resume()
        if self._news is not None:
            self._news.set()

    @property
    def stall(self) -> float | None:
        return None if self.exchange is None else self.exchange.plan.stall

    @property
    def finishes(self) -> bool:
        """Whether the plane waits for its end when it is asked to stop."""
        is_stream = self.answer is not None and self.answer.is_events
        return not is_stream or self.exchange is None or self.exchange.plan.finishes

    def abandon(self, plan: Plan, reason: str = "it took too long") -> None:
        """Leave the upstream to itself, and do this instead; an answer that has begun breaks off."""
        if self.is_over:
            return
        self._drop("late")
        if self.status:
            self.break_off(reason)
        else:
            self.go(plan)

    def client_left(self) -> None:
        """The client has gone: what was done for it is cancelled."""
        if self.is_over:
            return
        self.is_over = True
        if self.exchange is not None:
            self.exchange.drop("left")
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
            if self.status:
                self.break_off("something went wrong inside the node; its log has the details")
            else:
                self.go(_INTERNAL)
            return
        self._news = self._task = None
        if after is not None:
            self.go(after)

    async def read(self, limit: int) -> bytes:
        """The whole body; answers 413 and raises CancelledError when it is larger."""
        self.ask_for_body()
        while not self.is_whole:
            await self._wait()
            if self._held_size > limit:
                break
            self._client.resume()
        if self._held_size > limit:
            self.refuse(413, "PAYLOAD_TOO_LARGE", f"the body may have {limit} bytes, found more")
            raise asyncio.CancelledError
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
        if self.answer is not None and not self.bodiless:
            self.answer.body(body)
        self.finish()

    def refuse(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        """An error as the whole answer."""
        self.reply(status, error_headers(status, headers), self.tells(status, code, message))

    def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin an answer; it goes out with its first bytes, or at its end."""
        lines = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        self.begin_answer(status, lines, measured="content-length" in headers)

    def finish(self) -> None:
        """The answer is whole."""
        self.gone = None
        if not self.is_over:
            self.close_answer([])

    # ---- its answer, also an upstream's

    def begin_answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], *, measured: bool) -> Answer:
        """`measured`: the headers say how long its body is."""
        self.status = status
        self.keep_or_not()
        self.answer = Answer(self._client)
        self.answer.begin(self, status, headers, measured=measured)
        return self.answer

    def keep_or_not(self) -> None:
        """Whether the connection can serve another request after this answer."""
        if self._client.is_closing or self.upgrades or (self.expects and not self.is_whole):
            self.keep = False

    def close_answer(self, trailers: Headers) -> None:
        """The answer is whole: its client may ask for the next."""
        if self.answer is not None:
            self.answer.end(trailers)
        self.is_over = True
        self._client.done(self)

    def break_off(self, reason: str) -> None:
        """The answer has begun and will not be whole: its client must not take it for whole."""
        if self.answer is not None:
            if self.answer.is_events:
                event = b"event: error\ndata: " + self.tells(502, "BAD_UPSTREAM", reason) + b"\n\n"
                self.sent += len(event)
                self.answer.body(event)
            self.answer.flush()
        self.is_over = True
        self._client.cut()
