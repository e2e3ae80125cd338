"""Calls from the app's routes to the models of the same node, through the data plane. Standard library."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

from ostler import Body, OstlerError
from ostler.plane.access import token
from ostler.web.extend import NodeApi

_LINE = 16_777_216  # bytes of one item of a stream


class CallFailed(OstlerError):
    """A call was not answered with a result; it has the code and status that the plane or the model gave."""

    def __init__(self, message: str, code: str, status: int) -> None:
        super().__init__(message)
        self.code, self.status = code, status


@dataclass(frozen=True)
class Answer:
    result: Any
    request_id: str | None
    processing_time_ms: float | None
    model: str | None


@dataclass(frozen=True)
class Question:
    head: bytes
    body: bytes | memoryview


class Caller:
    """Calls the models of this node."""

    def __init__(self, node: NodeApi) -> None:
        self._node = node

    def ask(self, task: str, model: str | None, payload: Any, wishes: Mapping[str, str]) -> Question:
        """A call that can be sent; `wishes` are headers."""
        kind, body = "application/json", b""
        if isinstance(payload, Body):
            kind, body = payload.content_type, payload.data
        else:
            body = json.dumps({"model": model, "payload": payload}, allow_nan=False).encode()
        named = f"?model={quote(model, safe='')}" if model else ""
        lines = [f"POST /api/v1/calls/{quote(task)}{named} HTTP/1.1", f"host: {urlsplit(self._node.url).netloc}"]
        headers = {**wishes, "content-type": kind, "content-length": str(len(body)), "connection": "close"}
        headers["authorization"] = f"Bearer {token(self._node.settings)}"
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return Question("\r\n".join([*lines, "", ""]).encode(), body)

    async def answer(self, question: Question) -> Answer:
        """The whole answer; of a model that streams, the list of its items. Raises CallFailed."""
        items = [item async for item in self._items(question)]
        if len(items) == 1 and isinstance(items[0], Answer):
            return items[0]
        return Answer(items, None, None, None)

    async def stream(self, question: Question) -> AsyncGenerator[Any, None]:
        """The items as they come. Raises CallFailed."""
        async for item in self._items(question):
            yield item.result if isinstance(item, Answer) else item

    async def _items(self, question: Question) -> AsyncGenerator[Any, None]:
        parts = urlsplit(self._node.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=_LINE)
        try:
            writer.write(question.head)
            writer.write(question.body)
            status, headers = await _head(reader)
            if status == 200 and headers.get("content-type", "").startswith("text/event-stream"):
                async for item in _events(reader):
                    yield item
                return
            told = json.loads(await reader.readexactly(int(headers["content-length"])))
            if status >= 400:
                raise _error(told, status)
            yield Answer(**told)
        except (OSError, ValueError, KeyError, TypeError, asyncio.IncompleteReadError) as error:
            raise CallFailed(f"the call was not answered as it should be ({error!r})", "BAD_ANSWER", 502) from error
        finally:
            writer.close()


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    text = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = (line.partition(":") for line in text[1:] if line)
    return int(text[0].split(" ")[1]), {name.lower(): value.strip() for name, _, value in headers}


async def _events(reader: asyncio.StreamReader) -> AsyncGenerator[Any, None]:
    """The items of an event stream that comes in chunks."""
    kind = ""
    held = b""
    while True:
        size = int(await reader.readline(), 16)
        held += await reader.readexactly(size)
        await reader.readline()
        *lines, held = held.split(b"\n")
        for line in lines:
            name, _, value = line.strip().partition(b": ")
            if name == b"event":
                kind = value.decode("latin-1")
            elif value == b"[DONE]":
                return
            elif name == b"data":
                if kind == "error":
                    raise _error(json.loads(value), 500)
                yield json.loads(value)


def _error(told: Any, status: int) -> CallFailed:
    return CallFailed(str(told["error"]["message"]), str(told["error"]["code"]), status)
