"""How a model's worker answers a route that is not Ostler's own: the request as arguments of a method, and what it gives in the route's words,
whole or piece by piece. The routes are in openai.py. Standard library, Python 3.9.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any

from ostler.calls.body import Body, read_form, read_json
from ostler.calls.current import cancelled
from ostler.calls.request import BadRequest, Request

_LONGEST = 64 * 1024 * 1024  # characters of an answer whose pieces are put together


def error_object(status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(status, kind)
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Refused(BadRequest):
    """A request that cannot be taken; `param` is the part of it that is wrong."""

    def __init__(self, param: str | None, message: str, code: str = "invalid_value") -> None:
        super().__init__(400, code, message)
        self.param = param


class Asked:
    """A request: what the method is given, and how its answer is wanted."""

    name = model = ""  # of the request, and of the model as its caller called it

    def __init__(self, first: Any, options: dict[str, Any], *, form: str = "", stream: bool = False) -> None:
        self.first, self.options, self.form, self.stream = first, options, form, stream
        self.usage = False  # whether a stream ends with figures
        self.created = int(time.time())


class Speech:
    """One route of one model. `parse`, `whole` and `chunks` are the route's own."""

    joins = True  # what a generator yields are pieces of one text

    def __init__(self, method: Callable[..., Any], model_id: str) -> None:
        self._method, self._model_id = method, model_id

    def read(self, request: Request) -> Asked:
        """What is asked; raises BadRequest."""
        kind = request.headers.get("content-type", "")
        plain = kind.partition(";")[0].strip().lower()
        if plain == "multipart/form-data":
            form = read_form(request.body, kind)
            given: dict[str, Any] = dict(form.fields)
        else:
            form, given = Body(b""), read_json(request.body)
        if not isinstance(given, dict):
            raise Refused(None, f"the body must be a JSON object, found {kind_of(given)}")
        model = given.pop("model", None)
        asked = self.parse(given, form)
        asked.name = request.headers.get("x-ostler-request-id", "")
        asked.model = model if isinstance(model, str) else self._model_id
        return asked

    def parse(self, given: dict[str, Any], form: Body) -> Asked:
        """What is asked by these fields (and files); the fields that are left are the options. Raises BadRequest."""
        raise NotImplementedError

    def whole(self, asked: Asked, found: Any) -> Any:
        """The answer to what the method gave in full: JSON or a Body."""
        raise NotImplementedError

    def chunks(self, asked: Asked) -> Chunks:
        raise NotImplementedError

    def error(self, status: int, code: str, message: str, param: str | None) -> dict[str, Any]:
        return error_object(status, code, message, param)

    # ---- on a thread

    def run(self, asked: Asked) -> Any:
        """The answer, or an iterator of the chunks of one."""
        found = self._method(asked.first, asked.options)
        pieces = found if self.joins and hasattr(found, "__next__") else None
        if asked.stream:
            return self._stream(self.chunks(asked), [found] if pieces is None else pieces)
        if pieces is None:
            return self.whole(asked, found)
        made = Pieces()
        try:
            for piece in pieces:
                made.add(piece)
                if cancelled():
                    break
        finally:
            _close(pieces)
        return self.whole(asked, made.whole())

    def _stream(self, chunks: Chunks, pieces: Iterable[Any]) -> Iterator[dict[str, Any]]:
        try:
            for piece in pieces:
                yield from chunks.piece(piece)
            yield from chunks.end()
        finally:
            _close(pieces)

    # ---- on an event loop

    def later(self, asked: Asked) -> Any:
        """`run` for an async model: an awaitable, or an async iterator."""
        return self._later_stream(asked) if asked.stream else self._later_whole(asked)

    async def _later_whole(self, asked: Asked) -> Any:
        found = await self._given(asked)
        if not hasattr(found, "__anext__"):
            return self.whole(asked, found)
        made = Pieces()
        try:
            async for piece in found:
                made.add(piece)
        finally:
            await _aclose(found)
        return self.whole(asked, made.whole())

    async def _later_stream(self, asked: Asked) -> AsyncIterator[dict[str, Any]]:
        chunks, found = self.chunks(asked), await self._given(asked)
        pieces = found if hasattr(found, "__anext__") else _only(found)
        try:
            async for piece in pieces:
                for chunk in chunks.piece(piece):
                    yield chunk
            for chunk in chunks.end():
                yield chunk
        finally:
            await _aclose(pieces)

    async def _given(self, asked: Asked) -> Any:
        found = self._method(asked.first, asked.options)
        return await found if hasattr(found, "__await__") else found


async def _only(value: Any) -> AsyncIterator[Any]:
    yield value


def _close(pieces: Any) -> None:
    """Let a generator's `finally` blocks run; an iterator has none."""
    if hasattr(pieces, "close"):
        pieces.close()


async def _aclose(pieces: Any) -> None:
    if hasattr(pieces, "aclose"):
        await pieces.aclose()


class Pieces:
    """A text that comes in pieces, and what was said beside it."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._size = 0
        self.more: dict[str, Any] = {}

    def add(self, piece: Any) -> str:
        """The text of a piece; raises TypeError for what is none."""
        text, more = split(piece)
        for name, value in more.items():
            self.more[name] = self.more.get(name, []) + value if name == "tool_calls" else value
        self._size += len(text)
        if self._size > _LONGEST:
            raise RuntimeError(f"the answer has more than {_LONGEST} characters")
        self._texts.append(text)
        return text

    def whole(self) -> dict[str, Any]:
        return {**self.more, "content": "".join(self._texts)}


def split(piece: Any) -> tuple[str, dict[str, Any]]:
    """The text of a piece, and what else it says."""
    if isinstance(piece, str):
        return piece, {}
    if isinstance(piece, Mapping):
        more = dict(piece)
        text = more.pop("content", more.pop("text", None))
        if text is None or isinstance(text, str):
            return text or "", more
    raise TypeError(f"a piece of an answer must be text or a dict with 'content', found {kind_of(piece)}")


class Chunks:
    """A stream in OpenAI's words. Nothing is said before the method has given something: an error until then is an ordinary one."""

    def __init__(self, asked: Asked) -> None:
        self._asked, self._made = asked, Pieces()
        self._begun = False

    def piece(self, piece: Any) -> Iterable[dict[str, Any]]:
        raise NotImplementedError

    def end(self) -> Iterable[dict[str, Any]]:
        raise NotImplementedError


def usage_of(more: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that the model gave, or nothing."""
    said = more.get("usage")
    if not isinstance(said, Mapping):
        return {}
    known = {"prompt_tokens": 0, "completion_tokens": 0, **said}
    return {"usage": {"total_tokens": known["prompt_tokens"] + known["completion_tokens"], **known}}


def check(given: dict[str, Any], name: str, kind: type, low: float, high: float) -> None:
    """A number of the request; null is as good as none. Raises Refused."""
    value = given.get(name)
    if value is None:
        given.pop(name, None)
        return
    fits = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not fits or not low <= value <= high:
        what = "a whole number" if kind is int else "a number"
        raise Refused(name, f"{name} must be {what} from {low} to {high}, found {str(value)[:40]}")


def kind_of(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
