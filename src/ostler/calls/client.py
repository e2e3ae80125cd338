"""Calls to models from any Python program beside a node, and from jobs: what `app.call` does. Standard library alone."""

from __future__ import annotations

import contextlib
import json
import math
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from typing import Any
from urllib.parse import quote, urlsplit

from ostler.calls.address import called_url, credential
from ostler.calls.body import Body
from ostler.calls.calling import CallOptions
from ostler.calls.exchange import END, Answer, Question, answered, items_of, late
from ostler.calls.links import BlockingLinks, LoopLinks, Where, run
from ostler.calls.model import Duration, seconds
from ostler.config import Settings
from ostler.errors import BadArguments, CallBusy, CallError, ConfigError

_SLACK = 10.0  # seconds after a call's timeout in which the node itself says that it is over
_LOOK = 1.0  # seconds between two looks at where the node is
_HEADER = re.compile(r"[\x20-\x7e]{1,200}")


class Caller:
    """Calls the models of one node. Threads and event loops may share it."""

    def __init__(self, settings: Callable[[], Settings]) -> None:
        self._load = settings
        self._settings: Settings | None = None
        self._found, self._looked = ("", ""), -math.inf
        self._blocking, self._looped = BlockingLinks(), LoopLinks()

    def ask(self, task: str, model: str | None, payload: Any, options: CallOptions) -> Question:
        """A call that can be sent. Raises BadArguments, ConfigError or CallBusy; nothing was sent."""
        url, token, most = self._node()
        path, headers, body = encoded(task, model, payload)
        until, timeout, keep_alive, priority = (
            None,
            options.get("timeout"),
            options.get("keep_alive"),
            options.get("priority"),
        )
        if timeout is not None:
            wait = _seconds("timeout", timeout)
            if wait <= 0:
                raise BadArguments(f"timeout must be more than 0 seconds, found {timeout!r}")
            until = time.monotonic() + wait + _SLACK
            headers["x-ostler-timeout"] = f"{wait:.6f}"
        if keep_alive is not None:
            headers["x-ostler-keep-alive"] = f"{_seconds('keep_alive', keep_alive):.6f}"
        if priority:
            if not isinstance(priority, int):
                raise BadArguments(f"priority must be a whole number, found {priority!r}")
            headers["x-ostler-priority"] = str(priority)
        if token:
            headers["authorization"] = f"Bearer {token}"
        parts = urlsplit(url)
        lines = [f"POST {parts.path}{path} HTTP/1.1", f"host: {parts.netloc.rpartition('@')[2]}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines.append(f"content-length: {sum(map(len, body))}")
        head = "\r\n".join([*lines, "", ""]).encode()
        return Question(Where.of(url), url, head, body, until, most)

    def _node(self) -> tuple[str, str, int]:
        """Where the node is, what it is sent as proof, and the most bytes of an answer. Looked for anew each second."""
        if self._settings is None:
            self._settings = self._load()
        settings, now = self._settings, time.monotonic()
        if now - self._looked > _LOOK:
            url = called_url(settings)
            if url is None:
                raise CallBusy(
                    f"no node is running in {settings.data_dir}; start one with 'ostler up', or name one with OSTLER_URL",
                    "NO_NODE",
                )
            self._found, self._looked = (url, credential(settings)), now
        return *self._found, settings.max_body + 65_536

    # ---- the two forms

    async def answer(self, question: Question) -> Answer:
        """The whole answer. Raises CallError. A task that is cancelled here cancels the call in the model, too."""
        async with _in_time(question):
            return await answered(self._looped, question)

    def answer_sync(self, question: Question) -> Answer:
        return run(answered(self._blocking, question))

    async def stream(self, question: Question) -> AsyncGenerator[Any, None]:
        """The items as they come. Closing the iterator cancels the call. Raises CallError, also after some items."""
        items = items_of(self._looped, question)
        try:
            while True:
                async with _in_time(question):
                    item = await anext(items, END)
                if item is END:
                    return
                yield item
        finally:
            await items.aclose()

    def stream_sync(self, question: Question) -> Generator[Any, None, None]:
        items = items_of(self._blocking, question)
        try:
            while (item := run(_next(items))) is not END:
                yield item
        finally:
            run(items.aclose())


async def _next(items: AsyncIterator[Any]) -> Any:
    return await anext(items, END)


@contextlib.asynccontextmanager
async def _in_time(question: Question) -> AsyncIterator[None]:
    import asyncio  # noqa: PLC0415  the sync form does without

    left = None if question.until is None else max(0.0, question.until - time.monotonic())
    try:
        async with asyncio.timeout(left) as clock:
            yield
    except TimeoutError as error:
        if not clock.expired() or isinstance(error, CallError):
            raise
        raise late(question) from None


# ---- the question


def encoded(task: str, model: str | None, payload: Any) -> tuple[str, dict[str, str], tuple[bytes | memoryview, ...]]:
    """Path, headers and body of a call; raises BadArguments."""
    path = f"/api/v1/calls/{quote(str(task), safe='')}"
    if isinstance(payload, (bytes, bytearray, memoryview)):
        payload = Body(payload)
    if isinstance(payload, Body):
        kind, body = form(payload) if payload.fields or payload.files else (payload.content_type, (payload.view,))
        if not _HEADER.fullmatch(kind):
            raise BadArguments(f"the content type {kind[:80]!r} cannot be used as a header")
        return path + (f"?model={quote(model, safe='')}" if model else ""), {"content-type": kind}, body
    told = {"payload": payload} if model is None else {"model": model, "payload": payload}
    try:
        text = json.dumps(told, allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadArguments(f"the payload for {task!r} is not JSON: {error}") from None
    return path, {"content-type": "application/json"}, (text.encode(),)


def _plain(value: Any) -> Any:
    """Arrays and scalars of numpy and the like as lists and numbers."""
    if callable(convert := getattr(value, "tolist", None)):
        return convert()
    raise TypeError(f"a {type(value).__name__} is not JSON; bytes or an ostler.Body can only be the whole payload")


def form(body: Body) -> tuple[str, tuple[bytes | memoryview, ...]]:
    """A Body with fields or several files as a multipart form; raises BadArguments."""
    boundary = secrets.token_hex(16)
    parts: list[bytes | memoryview] = []

    def add(name: str, data: bytes | memoryview, more: str = "") -> None:
        head = f'--{boundary}\r\ncontent-disposition: form-data; name="{_quoted(name)}"{more}\r\n\r\n'
        parts.extend((head.encode(), data, b"\r\n"))

    for name, text in body.fields.items():
        add(name, str(text).encode())
    files = body.files or {"file": body}
    for name, file in files.items():
        if not _HEADER.fullmatch(file.content_type):
            raise BadArguments(f"the content type {file.content_type[:80]!r} cannot be used as a header")
        named = f'; filename="{_quoted(file.filename or name)}"'
        add(name, file.view, f"{named}\r\ncontent-type: {file.content_type}")
    parts.append(f"--{boundary}--\r\n".encode())
    return f"multipart/form-data; boundary={boundary}", tuple(parts)


def _quoted(name: str) -> str:
    if not name.isprintable():
        raise BadArguments(f"{name[:80]!r} cannot be the name of a form field")
    return name.replace("\\", "\\\\").replace('"', '\\"')


def _seconds(name: str, value: Duration) -> float:
    try:
        return seconds(value, name)
    except ConfigError as error:
        raise BadArguments(str(error)) from None
