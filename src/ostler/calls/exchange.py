"""One call over HTTP/1.1: the question goes out, its answer comes back, every length bounded. Standard library alone.

It is written once, over links that either wait on an event loop or block (links.py). A connection that breaks is replaced for the
same call only if nothing of it was sent: the model may have had the call otherwise.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from ostler.calls.body import Body
from ostler.calls.links import Link, Links, NotSent, Where
from ostler.errors import CallBusy, CallError, CallRefused, CallTimeout, ModelFailed

_MOST_HEADERS = 200
_AT_ONCE = 262_144
_REFUSED = frozenset(range(400, 500)) - {429}
END = object()  # of a stream


@dataclass(frozen=True)
class Answer:
    """What a model answered. `result` is JSON, or a Body where it sent bytes; of a stream, the list of its items."""

    result: Any
    request_id: str | None
    processing_time_ms: float | None
    model: str | None


@dataclass(frozen=True)
class Question:
    """A call as it is sent: the head without its end, and the body."""

    where: Where
    shown: str
    head: bytes
    body: Sequence[bytes | memoryview]
    until: float | None  # by the monotonic clock
    most: int  # bytes of an answer, or of one item of a stream


class _Reply:
    """The head of an answer, and its body as it comes. `whole` once all of it was read: the link can be used again."""

    def __init__(self, link: Link, status: int, headers: dict[str, str]) -> None:
        self.link, self.status, self.headers = link, status, headers
        self.chunked = headers.get("transfer-encoding", "").lower().endswith("chunked")
        length = None if self.chunked else headers.get("content-length")
        self._left = None if length is None else _number(length, 10)  # of the body, or of a chunk
        self.whole = self._over = False

    @property
    def kind(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def streams(self) -> bool:
        return self.status == 200 and (
            self.kind == "text/event-stream" or (self.chunked and self.kind != "application/json")
        )

    async def piece(self) -> bytes:
        """Some of the body, b"" at its end. Raises ValueError where it breaks off or is not HTTP."""
        if self.chunked and not self._left and not self._over:
            await self._next_chunk()
        if self._left == 0 or self._over:
            self._over = True
            self.whole = self.headers.get("connection", "").lower() != "close"
            return b""
        found = await self.link.some(_AT_ONCE if self._left is None else min(self._left, _AT_ONCE))
        if self._left is not None:
            if not found:
                raise ValueError("it ended early")
            self._left -= len(found)
        else:  # its end is that of the connection
            self._over = not found
        return found

    async def _next_chunk(self) -> None:
        if self._left == 0:
            await self.link.line()  # the end of the chunk before
        self._left = _number((await self.link.line()).decode("latin-1").partition(";")[0], 16)
        if not self._left:
            self._over = True
            while (await self.link.line()).strip():
                pass  # trailers

    async def read(self, most: int) -> bytes:
        found = bytearray()
        while piece := await self.piece():
            found += piece
            if len(found) > most:
                raise ValueError(f"it is longer than {most} bytes (max_body)")
        return bytes(found)


def _number(text: str, base: int) -> int:
    if not text.strip().isalnum():
        raise ValueError("it ended early" if not text else "it does not speak HTTP")
    return int(text, base)


@contextlib.asynccontextmanager
async def _exchange(links: Links, question: Question) -> AsyncIterator[_Reply]:
    """Send the question; its answer. However this ends, the link is given back or closed, and what goes wrong is a CallError."""
    link: Link | None = None
    try:
        for last in (False, True):
            link = await _open(links, question)
            try:
                reply = await _asked(link, question)
                break
            except NotSent:  # closed while it was idle
                link.close()
                if last:
                    raise
        yield reply
        if reply.whole:
            links.give(reply.link)
            link = None
    except CallError:
        raise
    except TimeoutError:
        raise late(question) from None
    except (OSError, ValueError) as error:
        message = f"the node at {question.shown} did not answer properly ({error}); the call may have been run"
        raise ModelFailed(message, "BAD_ANSWER", 502) from error
    finally:
        if link is not None:
            link.close()


async def _open(links: Links, question: Question) -> Link:
    try:
        return await links.take(question.where, question.until)
    except OSError as error:
        message = f"the node at {question.shown} cannot be reached ({error or 'no answer'}); nothing was run"
        raise CallBusy(message, "NO_NODE") from error


async def _asked(link: Link, question: Question) -> _Reply:
    """Send the question, and read the head of its answer; an answer may come before all was sent."""
    broken: OSError | None = None
    try:
        await link.send([question.head, *question.body])
    except (NotSent, TimeoutError):
        raise
    except OSError as error:
        broken = error
    try:
        while (reply := await _head(link)).status < 200:
            pass
    except (OSError, ValueError) as error:
        raise broken or error from None
    if broken is not None:
        reply.headers["connection"] = "close"
    return reply


async def _head(link: Link) -> _Reply:
    first = (await link.line()).decode("latin-1").split(" ", 2)
    if len(first) < 2 or first[0] not in ("HTTP/1.1", "HTTP/1.0") or not first[1].strip().isdigit():
        raise ValueError("it closed the connection" if first == [""] else "it does not speak HTTP")
    headers: dict[str, str] = {}
    for _ in range(_MOST_HEADERS):
        text = (await link.line()).decode("latin-1")
        if text in ("\r\n", "\n"):
            break
        name, colon, value = text.partition(":")
        if not colon:
            raise ValueError("it ended early")
        headers[name.strip().lower()] = value.strip()
    else:
        raise ValueError("it has too many headers")
    if first[0] == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return _Reply(link, int(first[1]), headers)


# ---- the answer


async def answered(links: Links, question: Question) -> Answer:
    async with _exchange(links, question) as reply:
        if reply.kind != "text/event-stream" or reply.status != 200:
            return _whole(reply, await reply.read(question.most), question)
        items: list[Any] = []
        events = _Events(reply, question)
        while (item := await events.next()) is not END:
            items.append(item)
            if events.size > question.most:
                raise ValueError(f"its items are longer than {question.most} bytes (max_body); use app.stream")
        return Answer(items, reply.headers.get("x-ostler-request-id"), None, None)


async def fetched(links: Links, question: Question) -> tuple[int, bytes]:
    """Status and body of any request, whatever they say. Raises CallError when there is no whole answer."""
    async with _exchange(links, question) as reply:
        return reply.status, await reply.read(question.most)


async def items_of(links: Links, question: Question) -> AsyncGenerator[Any, None]:
    async with _exchange(links, question) as reply:
        if not reply.streams:
            yield _whole(reply, await reply.read(question.most), question).result
        elif reply.kind == "text/event-stream":
            events = _Events(reply, question)
            while (item := await events.next()) is not END:
                yield item
        else:
            while piece := await reply.piece():
                yield piece


def _whole(reply: _Reply, data: bytes, question: Question) -> Answer:
    """An answer that is not a stream; raises the CallError that it says."""
    headers = reply.headers
    if reply.status >= 400:
        raise _error(reply, data, question)
    named = headers.get("x-ostler-request-id")
    if reply.kind != "application/json":
        spent = headers.get("x-ostler-processing-ms")
        body = Body(data, headers.get("content-type", "application/octet-stream"))
        return Answer(body, named, float(spent) if spent else None, None)
    told = json.loads(data)
    if isinstance(told, dict) and told.keys() == {"result", "request_id", "processing_time_ms", "model"}:
        return Answer(told["result"], told["request_id"], told["processing_time_ms"], told["model"])
    return Answer(told, named, None, None)  # of a server that is not Ostler's


class _Events:
    """The items of an event stream."""

    def __init__(self, reply: _Reply, question: Question) -> None:
        self._reply, self._question = reply, question
        self._buffer = bytearray()
        self._seen = 0
        self.size = 0  # of all lines so far

    async def next(self) -> Any:
        """The next item, or END. Raises CallError for an event that says so, ValueError for a stream that breaks off."""
        kind, data = "", bytearray()
        while (line := await self._line()) is not None:
            name, _, value = line.partition(b":")
            if name == b"data":
                data += value.removeprefix(b" ") if not data else b"\n" + value.removeprefix(b" ")
                if len(data) > self._question.most:
                    raise ValueError(f"an item is longer than {self._question.most} bytes (max_body)")
            elif name == b"event":
                kind = value.strip().decode("latin-1")
            elif not line and data:
                if kind == "error":
                    raise _error(self._reply, bytes(data), self._question)
                if data == b"[DONE]":
                    while await self._reply.piece():
                        pass  # what ends the body: then the link can be used again
                    return END
                return _item(bytes(data))
        if self._reply.chunked:
            return END  # a server that is not Ostler's may end without a word
        raise ValueError("it ended early")

    async def _line(self) -> bytes | None:
        while (at := self._buffer.find(b"\n", self._seen)) < 0:
            self._seen = len(self._buffer)
            if self._seen > self._question.most:
                raise ValueError(f"a line is longer than {self._question.most} bytes (max_body)")
            piece = await self._reply.piece()
            if not piece:
                return None
            self._buffer += piece
        line = bytes(self._buffer[:at]).removesuffix(b"\r")
        del self._buffer[: at + 1]
        self._seen = 0
        self.size += at
        return line


def _item(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")  # of a server that is not Ostler's


def _error(reply: _Reply, data: bytes, question: Question) -> CallError:
    """The error that an answer says."""
    try:
        told = json.loads(data)["error"]
        code, message, named = str(told["code"]), str(told["message"]), told.get("request_id")
    except (ValueError, TypeError, KeyError, AttributeError):
        code, message, named = "BAD_ANSWER", f"the node at {question.shown} answered {reply.status}", None
    status, after = reply.status, reply.headers.get("retry-after", "")
    if status == 401:
        message = f"the node at {question.shown} requires a token: set OSTLER_TOKEN (`ostler token` prints it)"
    named = named or reply.headers.get("x-ostler-request-id")
    return error_of(status, code, message, named, float(after) if after.isdigit() else None)


def error_of(
    status: int, code: str, message: str, request_id: str | None = None, retry_after: float | None = None
) -> CallError:
    """The exception of a call that was answered with this status and code."""
    kind: type[CallError] = ModelFailed
    if status in _REFUSED:
        kind = CallRefused
    elif status == 429 or (status == 503 and code != "MODEL_FAILED"):
        kind = CallBusy
    elif status == 504:
        kind = CallTimeout
    return kind(message, code, status if status >= 400 else 500, request_id, retry_after)


def late(question: Question) -> CallTimeout:
    return CallTimeout(f"the node at {question.shown} did not answer in time; the call is cancelled", "DEADLINE", 504)
