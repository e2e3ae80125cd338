"""Bodies that are not JSON, and what a model gets of a request. Standard library, Python 3.9."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ostler.calls.request import BadRequest, Request

DEEPEST = 200  # levels of lists and objects in JSON
_MOST_PARTS = 1000
_NOT_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))
_SQUARE = bytes.maketrans(b"{}", b"[]")
_ESCAPE = re.compile(rb"\\.", re.DOTALL)
_PARAMETER = re.compile(r';\s*([\w\-*]+)\s*=\s*("((?:[^"\\]|\\.)*)"|[^;\s]*)')


class Body:
    """Raw bytes with their type: what a model gets for a body that is not JSON, and may return instead of JSON.

    Of a multipart form, `data`, `content_type` and `filename` are those of its first file, `fields` its texts, and `files` all files
    by the name of their field.
    """

    __slots__ = ("_data", "_view", "content_type", "fields", "filename", "files")

    def __init__(
        self,
        data: Any,
        content_type: str = "application/octet-stream",
        filename: str | None = None,
        fields: Mapping[str, str] | None = None,
        files: Mapping[str, Body] | None = None,
    ) -> None:
        self._data: bytes | None = data if isinstance(data, bytes) else None
        self._view = memoryview(data).cast("B")
        self.content_type = content_type
        self.filename = filename
        self.fields: dict[str, str] = dict(fields or {})
        self.files: dict[str, Body] = dict(files or {})

    @property
    def data(self) -> bytes:
        """The bytes."""
        if self._data is None:
            self._data = bytes(self._view)
        return self._data

    @property
    def view(self) -> memoryview:
        """The bytes without a copy, for `numpy.frombuffer` and the like."""
        return self._view

    def __len__(self) -> int:
        return len(self._view)

    def __repr__(self) -> str:
        return f"<Body {len(self)} bytes of {self.content_type}>"


def payload_of(request: Request) -> Any:
    """What the model is given; raises BadRequest.

    Of a JSON object with `payload`, the value of that; any other JSON value as it is; everything else is a `Body`. JSON is also what `curl -d`
    sends of it, with the type of a form.
    """
    kind = request.headers.get("content-type", "")
    plain = kind.partition(";")[0].strip().lower()
    if plain in ("application/json", "") or plain.endswith("+json"):
        if not request.body and not plain:
            return None
        return _payload(read_json(request.body))
    if plain == "application/x-www-form-urlencoded" and request.body[:64].lstrip()[:1] in (b"{", b"["):
        try:
            return _payload(read_json(request.body))
        except BadRequest:
            return Body(request.body, kind)
    if plain == "multipart/form-data":
        return read_form(request.body, kind)
    return Body(request.body, kind)


def _payload(value: Any) -> Any:
    return value["payload"] if isinstance(value, dict) and "payload" in value else value


def read_json(body: bytes | bytearray) -> Any:
    """The value; raises BadRequest."""
    if body.count(b"[") + body.count(b"{") > DEEPEST and _too_deep(bytes(body)):
        raise BadRequest(400, "BAD_PAYLOAD", f"the JSON is nested deeper than {DEEPEST} levels")
    try:
        return _decode(body.decode())
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, "BAD_PAYLOAD", f"the body is not JSON: {error}") from None


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


_decode = json.JSONDecoder(parse_constant=_refuse).decode


def _too_deep(body: bytes) -> bool:
    """Whether brackets are nested too deep: all else is removed, then one level after another. Fast on megabytes of numbers."""
    if b"\\" in body:
        body = _ESCAPE.sub(b"", body)
    brackets = b"".join(body.translate(_SQUARE, _NOT_BRACKETS).split(b'"')[::2])
    for _ in range(DEEPEST):
        if not brackets:
            return False
        shorter = brackets.replace(b"[]", b"")
        if len(shorter) == len(brackets):
            return False  # not closed: no JSON, which the parser will say
        brackets = shorter
    return bool(brackets)


def read_form(body: bytes | bytearray, content_type: str) -> Body:
    """A multipart form; raises BadRequest."""
    boundary = _parameters(content_type).get("boundary", "")
    if not 0 < len(boundary) <= 200:
        raise BadRequest(400, "BAD_PAYLOAD", "a multipart body needs a boundary in its content type")
    mark = b"--" + boundary.encode("latin-1")
    fields: dict[str, str] = {}
    files: dict[str, Body] = {}
    view = memoryview(body)
    at = 0 if body.startswith(mark) else body.find(b"\r\n" + mark) + 2
    if at == 1:
        raise BadRequest(400, "BAD_PAYLOAD", "the multipart body does not have its boundary")
    for _ in range(_MOST_PARTS):
        at += len(mark)
        if body[at : at + 2] == b"--":
            break
        start, end = body.find(b"\r\n\r\n", at), body.find(b"\r\n" + mark, at)
        if start < 0 or end < start + 2 or body[at : at + 2] != b"\r\n":
            raise BadRequest(400, "BAD_PAYLOAD", "the multipart body is cut off")
        # A part without content ends where its head ends: the line break before the boundary is the head's.
        data = view[start + 4 : end] if end >= start + 4 else view[:0]
        _take(bytes(body[at + 2 : start]), data, fields, files)
        at = end + 2
    else:
        raise BadRequest(400, "BAD_PAYLOAD", f"the multipart body has more than {_MOST_PARTS} parts")
    first = next(iter(files.values()), Body(b"", "multipart/form-data"))
    return Body(first.view, first.content_type, first.filename, fields, files)


def _take(head: bytes, data: memoryview, fields: dict[str, str], files: dict[str, Body]) -> None:
    headers: dict[str, str] = {}
    for line in head.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    said = _parameters(headers.get("content-disposition", ""))
    if "name" not in said:
        raise BadRequest(400, "BAD_PAYLOAD", "a part of the multipart body has no name")
    if "filename" in said:
        kind = headers.get("content-type", "application/octet-stream")
        files[said["name"]] = Body(data, kind, said["filename"])
        return
    try:
        fields[said["name"]] = str(data, "utf-8")
    except UnicodeDecodeError:
        raise BadRequest(400, "BAD_PAYLOAD", f"the form field {said['name'][:80]!r} is not UTF-8 text") from None


def _parameters(value: str) -> dict[str, str]:
    found = {}
    for name, whole, quoted in _PARAMETER.findall(value):
        found[name.lower()] = re.sub(r"\\(.)", r"\1", quoted) if whole.startswith('"') else whole
    return found
