"""Answers as bytes: results, errors and streams, for one connection. No I/O. Standard library, Python 3.9."""

from __future__ import annotations

import json
import math
import re
import time
from json.encoder import c_make_encoder, encode_basestring_ascii  # type: ignore[attr-defined]
from typing import Any

from ostler.calls.body import Body
from ostler.calls.current import Call
from ostler.calls.request import BadRequest
from ostler.errors import InputError

_REASONS = {
    100: "Continue", 200: "OK", 202: "Accepted", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed",
    413: "Content Too Large", 431: "Request Header Fields Too Large", 500: "Internal Server Error", 501: "Not Implemented",
    503: "Service Unavailable", 504: "Gateway Timeout", 507: "Insufficient Storage",
}  # fmt: skip
_OUT_OF_MEMORY = re.compile(
    r"out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUBLAS_STATUS_ALLOC_FAILED|Failed to allocate memory|bad_alloc",
    re.IGNORECASE,
)
_KIND = re.compile(r"[\x20-\x7e]{1,200}")
_LONGEST_MESSAGE = 4000
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class NotJson(Exception):
    """A result that cannot be written as JSON; the message says what and where."""


def _plain(value: Any) -> Any:
    """Arrays and scalars of numpy, torch and the like as lists and numbers."""
    for method in ("tolist", "item"):
        convert = getattr(value, method, None)
        if callable(convert):
            return convert()
    raise TypeError(f"a {type(value).__name__} is not JSON")


# The encoder in C is made once; `json.dumps` would make a new one for each answer.
_chunks = c_make_encoder(None, _plain, encode_basestring_ascii, None, ":", ",", False, False, False)


def dumps(value: Any) -> str:
    """JSON without NaN; raises NotJson."""
    try:
        return "".join(_chunks(value, 0))
    except RecursionError:
        raise NotJson("it is nested too deep, or contains itself") from None
    except Exception as error:  # noqa: BLE001  `tolist` of somebody else's class may raise anything
        raise NotJson(_blame(value, "result", 0) or str(error)) from None


def _blame(value: Any, where: str, depth: int) -> str | None:
    """What is wrong in it and where."""
    if depth > 50:
        return None
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{where} is {value}, which JSON does not have"
    if value is None or isinstance(value, (str, int)):
        return None
    inside: Any
    if isinstance(value, dict):
        for key in value:
            if key is not None and not isinstance(key, (str, int, float)):
                return f"{where} has a key {str(key)[:80]!r} of type {type(key).__name__}; keys must be text"
        inside = ((f"{where}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        inside = ((f"{where}[{number}]", item) for number, item in enumerate(value))
    else:
        if isinstance(value, (bytes, bytearray, memoryview)):
            return (
                f"{where} is {type(value).__name__}; return bytes alone (or ostler.Body), or text, base64 for example"
            )
        try:
            return _blame(_plain(value), where, depth + 1)
        except Exception as error:  # noqa: BLE001
            return f"{where} cannot be converted: {error}"
    return next((found for name, item in inside if (found := _blame(item, name, depth + 1))), None)


def head(
    status: int, kind: str, length: int | None, *, keep: bool = True, call: Call | None = None, more: str = ""
) -> bytes:
    """The head of an answer; without a length the body is chunked, or ends with the connection for HTTP/1.0."""
    size = f"content-length: {length}" if length is not None else "transfer-encoding: chunked"
    if length is None and call is not None and call.old:
        size = "cache-control: no-store"
    named = "" if call is None else f"x-ostler-request-id: {call.id}\r\n"
    if call is not None and call.speech is not None:
        named += f"x-request-id: {call.id}\r\n"  # where its clients look
    close = "" if keep else "connection: close\r\n"
    return f"HTTP/1.1 {status} {_REASONS[status]}\r\ncontent-type: {kind}\r\n{size}\r\n{named}{close}{more}\r\n".encode(
        "latin-1"
    )


def plain(status: int, value: Any, *, keep: bool = True, more: str = "") -> bytes:
    """An answer of the worker itself."""
    body = json.dumps(value).encode()
    return head(status, "application/json", len(body), keep=keep, more=more) + body


def error(
    status: int,
    code: str,
    message: str,
    call: Call | None = None,
    *,
    keep: bool = True,
    more: str = "",
    param: str | None = None,
) -> bytes:
    """An error in the one shape that all errors have, or in that of the call's route."""
    body = _told(status, code, message, call, param)
    if status >= 500 and call is not None and call.speech is not None:
        more += "x-should-retry: false\r\n"  # it has run: its clients would repeat it
    return head(status, "application/json", len(body), keep=keep, call=call, more=more) + body


def _told(status: int, code: str, message: str, call: Call | None, param: str | None = None) -> bytes:
    message = message[:_LONGEST_MESSAGE]
    if call is not None and call.speech is not None:
        return json.dumps(call.speech.error(status, code, message, param)).encode()
    return json.dumps({"error": {"code": code, "message": message, "request_id": call.id if call else None}}).encode()


def judge(raised: BaseException) -> tuple[int, str, str]:
    """Status, code and message for what a model raised."""
    if isinstance(raised, BadRequest):
        return raised.status, raised.code, str(raised)
    try:
        text = str(raised)
    except Exception:  # noqa: BLE001  its own fault, and no reason to fall
        text = "its message cannot be shown"
    if isinstance(raised, NotJson):
        return 500, "MODEL_ERROR", f"the result cannot be sent: {text}"
    if isinstance(raised, InputError):
        return 400, "BAD_PAYLOAD", text or type(raised).__name__
    said = f"{type(raised).__name__}: {text}" if text else type(raised).__name__
    if isinstance(raised, MemoryError) or is_out_of_memory(said):
        return 507, "OUT_OF_MEMORY", said
    return 500, "MODEL_ERROR", said


def is_out_of_memory(said: str) -> bool:
    """Whether an error's type and text say that memory ran out, of the host or of a device."""
    return "OutOfMemory" in said or "MemoryError" in said or _OUT_OF_MEMORY.search(said) is not None


def failed(call: Call, raised: BaseException) -> bytes:
    """The answer to a call whose model raised."""
    status, code, message = judge(raised)
    return error(status, code, message, call, keep=call.keep, param=getattr(raised, "param", None))


class Writer:
    """Writes the results of one model as answers."""

    def __init__(self, model: str, limit: int) -> None:
        self._limit = limit
        self._end = f',"model":{json.dumps(model)}}}'

    def result(self, call: Call, result: Any) -> bytes:
        """A whole result: raw if it is bytes or a Body, else JSON. Raises NotJson."""
        if isinstance(result, (bytes, bytearray, memoryview, Body)):
            return self._raw(call, result)
        text = dumps(result)
        spent = (time.perf_counter() - call.started) * 1000
        name = encode_basestring_ascii(call.id)
        body = f'{{"result":{text},"request_id":{name},"processing_time_ms":{spent:.3f}{self._end}'.encode()
        self._check(len(body))
        if call.keep:
            return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
                len(body),
                body,
            )
        return head(200, "application/json", len(body), keep=False) + body

    def plain(self, call: Call, result: Any) -> bytes:
        """A result as it is, without what Ostler says of a call. Raises NotJson."""
        if isinstance(result, Body):
            return self._raw(call, result)
        body = dumps(result).encode()
        self._check(len(body))
        return head(200, "application/json", len(body), keep=call.keep, call=call) + body

    def _raw(self, call: Call, result: Any) -> bytes:
        kind, data = raw(result)
        self._check(len(data))
        spent = f"x-ostler-processing-ms: {(time.perf_counter() - call.started) * 1000:.3f}\r\n"
        return head(200, kind, len(data), keep=call.keep, call=call, more=spent) + data

    def _check(self, size: int) -> None:
        if size > self._limit:
            raise NotJson(f"it is {size} bytes long, more than {self._limit}; yield it in parts")


def raw(result: Any) -> tuple[str, bytes]:
    """Content type and bytes."""
    if isinstance(result, Body):
        if not _KIND.fullmatch(result.content_type):
            raise NotJson(f"its content type {result.content_type[:80]!r} is not usable as a header")
        return result.content_type, result.data
    return "application/octet-stream", bytes(result)


class Stream:
    """A stream of results as bytes. What it is follows from the first item and from what the caller accepts.

    `text/event-stream` by default, `application/x-ndjson` where it is accepted, raw chunks of bytes.
    """

    def __init__(self, call: Call, first: Any) -> None:
        self._call = call
        self._chunked = not call.old
        accept = call.accept.lower()
        if isinstance(first, (bytes, bytearray, memoryview, Body)):
            self._kind = raw(first)[0]
            self._frame = _as_bytes
        elif "application/x-ndjson" in accept:
            self._kind, self._frame = "application/x-ndjson", _as_line
        elif "application/octet-stream" in accept and "text/event-stream" not in accept:
            self._kind, self._frame = "application/octet-stream", _as_bytes
        else:
            self._kind, self._frame = "text/event-stream", _as_event

    def begin(self) -> bytes:
        keep = self._call.keep and self._chunked
        return head(
            200, self._kind, None, keep=keep, call=self._call, more="cache-control: no-store\r\n" * self._chunked
        )

    def item(self, value: Any) -> bytes:
        """One item; raises NotJson."""
        data = self._frame(value)
        return self._chunk(data) if data else b""  # an empty chunk would be the end

    def end(self) -> bytes:
        done = self._chunk(b"data: [DONE]\n\n") if self._frame is _as_event else b""
        return done + b"0\r\n\r\n" if self._chunked else done

    def broken(self, raised: BaseException) -> bytes:
        """What is said of an error after the first byte. The connection is closed then, without the end of a body."""
        text = _told(*judge(raised), self._call)
        if self._frame is _as_event:
            return self._chunk(b"event: error\ndata: " + text + b"\n\n")
        return self._chunk(text + b"\n") if self._frame is _as_line else b""

    def _chunk(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data


def _as_event(value: Any) -> bytes:
    return f"data: {dumps(value)}\n\n".encode()


def _as_line(value: Any) -> bytes:
    return f"{dumps(value)}\n".encode()


def _as_bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray, memoryview, Body)):
        return raw(value)[1]
    raise NotJson(f"a stream of bytes has an item of type {type(value).__name__}")
