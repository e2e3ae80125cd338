"""OpenAI's routes as a model's worker answers them: what was asked, as arguments of a method, and what it gave, in OpenAI's words.

    POST /v1/embeddings             embed(self, texts, options)         vectors, or {"embeddings", "usage"}
    POST /v1/chat/completions       chat(self, messages, options)       a text or pieces of one, or {"content", "finish_reason", "usage", "tool_calls"}
    POST /v1/audio/transcriptions   transcribe(self, audio, options)    a text or pieces of one, or {"text", "segments", "language", "duration", "usage"}

No figure is made up: tokens are counted where the model says how many there were. Standard library, Python 3.9.
"""

from __future__ import annotations

import base64
import inspect
import math
import sys
from array import array
from collections.abc import Iterator
from typing import Any

from ostler.calls.body import Body
from ostler.calls.speech import Asked, Chunks, Refused, Speech, check, kind_of, split, usage_of

ROUTES = {"/v1/embeddings": "embed", "/v1/chat/completions": "chat", "/v1/audio/transcriptions": "transcribe"}
_MOST_TEXTS = 2048
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def spoken(target: Any) -> list[str]:
    """The methods of a model's class that answer these routes: those that take two arguments."""
    found = []
    for method in ROUTES.values():
        function = getattr(target, method, None)
        if callable(function):
            try:
                inspect.signature(function).bind(*[None] * (3 if inspect.isclass(target) else 2))
            except (TypeError, ValueError):
                continue
            found.append(method)
    return found


# ---- embeddings


class Embeddings(Speech):
    joins = False

    def parse(self, given: dict[str, Any], form: Body) -> Asked:
        texts = given.pop("input", None)
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list) or not 0 < len(texts) <= _MOST_TEXTS:
            raise Refused("input", f"input must be a text or a list of 1 to {_MOST_TEXTS} texts")
        if not all(isinstance(text, str) for text in texts):
            raise Refused("input", "input must be text: this model does not take tokens")
        wanted = given.pop("encoding_format", "float")
        if wanted not in ("float", "base64"):
            raise Refused("encoding_format", f"encoding_format must be float or base64, found {wanted!r}")
        check(given, "dimensions", int, 1, 1_000_000)
        return Asked(texts, given, form=wanted)

    def whole(self, asked: Asked, found: Any) -> Any:
        vectors, said = (found.get("embeddings"), found.get("usage")) if isinstance(found, dict) else (found, None)
        rows = [self._floats(row, asked) for row in (() if vectors is None else vectors)]
        if len(rows) != len(asked.first):
            raise RuntimeError(
                f"embed must return a vector for each text: {len(asked.first)} texts, found {len(rows)} vectors"
            )
        tokens = int(said.get("prompt_tokens", 0)) if isinstance(said, dict) else 0
        shown = _base64 if asked.form == "base64" else list
        data = [{"object": "embedding", "index": n, "embedding": shown(row)} for n, row in enumerate(rows)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"object": "list", "data": data, "model": asked.model, "usage": usage}

    def _floats(self, row: Any, asked: Asked) -> array[float]:
        try:
            found = array("d", row.tolist() if hasattr(row, "tolist") else row)
        except TypeError:
            raise RuntimeError(f"embed must return vectors of numbers, found {kind_of(row)}") from None
        if not all(map(math.isfinite, found)):
            raise RuntimeError("a vector has NaN or an infinite number in it")
        wanted = asked.options.get("dimensions")
        if wanted is not None and wanted != len(found):
            raise Refused("dimensions", f"this model has vectors of {len(found)} dimensions, and not of {wanted}")
        return found


def _base64(row: array[float]) -> str:
    """Little-endian numbers of 32 bits."""
    packed = array("f", row)
    if sys.byteorder == "big":
        packed.byteswap()
    return base64.b64encode(packed.tobytes()).decode()


# ---- chat


class Chat(Speech):
    def parse(self, given: dict[str, Any], form: Body) -> Asked:
        messages = given.pop("messages", None)
        if not isinstance(messages, list) or not messages:
            raise Refused("messages", "messages must be a list of at least one message")
        read = [_message(message, number) for number, message in enumerate(messages)]
        stream, extra, several = given.pop("stream", None), given.pop("stream_options", None), given.pop("n", None)
        if not isinstance(stream, (bool, type(None))):
            raise Refused("stream", f"stream must be true or false, found {kind_of(stream)}")
        if several not in (None, 1):
            raise Refused("n", "n must be 1: a call has one answer")
        _limits(given)
        asked = Asked(read, given, stream=bool(stream))
        asked.usage = isinstance(extra, dict) and extra.get("include_usage") is True
        return asked

    def whole(self, asked: Asked, found: Any) -> Any:
        text, more = split(found)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls := more.get("tool_calls"):
            message |= {"content": text or None, "tool_calls": calls}
        reason = more.get("finish_reason") or ("tool_calls" if calls else "stop")
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        return {**_about(asked, "chat.completion"), "choices": [choice], **usage_of(more)}

    def chunks(self, asked: Asked) -> Chunks:
        return _ChatChunks(asked)


class _ChatChunks(Chunks):
    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**_about(self._asked, "chat.completion.chunk"), "choices": [choice]}

    def _begin(self) -> Iterator[dict[str, Any]]:
        if not self._begun:
            self._begun = True
            yield self._chunk({"role": "assistant", "content": ""})

    def piece(self, piece: Any) -> Iterator[dict[str, Any]]:
        text, calls = self._made.add(piece), [] if isinstance(piece, str) else piece.get("tool_calls") or []
        yield from self._begin()
        if text or calls:
            yield self._chunk({**({"content": text} if text else {}), **({"tool_calls": calls} if calls else {})})

    def end(self) -> Iterator[dict[str, Any]]:
        yield from self._begin()
        more = self._made.more
        yield self._chunk({}, more.get("finish_reason") or ("tool_calls" if more.get("tool_calls") else "stop"))
        if self._asked.usage and (usage := usage_of(more)):
            yield {**_about(self._asked, "chat.completion.chunk"), "choices": [], **usage}


def _message(message: Any, number: int) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message, dict) or message.get("role") not in _ROLES:
        raise Refused(where, f"{where} must be an object with a role ({', '.join(_ROLES)}) and content")
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        texts = [part.get("text") for part in content if part.get("type") == "text"]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            content = "".join(texts)  # the model need not know that it came in parts
    elif content is None and message["role"] == "assistant":
        content = ""
    elif not isinstance(content, str):
        raise Refused(f"{where}.content", f"{where}.content must be text or a list of parts, found {kind_of(content)}")
    return {**message, "content": content}


def _limits(given: dict[str, Any]) -> None:
    """Check the options that most models have; one word for what has two."""
    check(given, "temperature", float, 0, 2)
    check(given, "top_p", float, 0, 1)
    for name in ("presence_penalty", "frequency_penalty"):
        check(given, name, float, -2, 2)
    check(given, "max_tokens", int, 1, 10_000_000)
    check(given, "max_completion_tokens", int, 1, 10_000_000)
    check(given, "seed", int, -(2**63), 2**63 - 1)
    if "max_completion_tokens" in given:
        given["max_tokens"] = given.pop("max_completion_tokens")
    stop = given.pop("stop", None)
    stop = [stop] if isinstance(stop, str) else stop
    if stop is not None:
        if not isinstance(stop, list) or not all(isinstance(text, str) for text in stop):
            raise Refused("stop", "stop must be a text or a list of texts")
        given["stop"] = stop


# ---- transcriptions


class Transcriptions(Speech):
    def parse(self, given: dict[str, Any], form: Body) -> Asked:
        audio = form.files.get("file")
        if audio is None:
            raise Refused("file", "send a multipart form with the audio in the field 'file'")
        wanted, stream = given.pop("response_format", "json"), given.pop("stream", "false")
        if wanted not in ("json", "text", "verbose_json"):
            message = f"response_format must be json, text or verbose_json, found {wanted!r}"
            raise Refused("response_format", message)
        if stream.lower() not in ("true", "false"):
            raise Refused("stream", f"stream must be true or false, found {stream[:40]!r}")
        try:
            if "temperature" in given:
                given["temperature"] = float(given["temperature"])
        except ValueError:
            raise Refused("temperature", f"temperature must be a number, found {given['temperature'][:40]!r}") from None
        check(given, "temperature", float, 0, 1)
        return Asked(audio, given, form=wanted, stream=stream.lower() == "true")

    def whole(self, asked: Asked, found: Any) -> Any:
        text, more = split(found)
        if asked.form == "text":
            return Body(text.encode() + b"\n", "text/plain; charset=utf-8")
        if asked.form == "json":
            return {"text": text, **usage_of(more)}
        segments = [{"id": n, **segment} for n, segment in enumerate(more.get("segments") or [])]
        known = {"language": more.get("language") or asked.options.get("language"), "duration": more.get("duration")}
        if known["duration"] is None and segments:
            known["duration"] = segments[-1].get("end")
        said = {name: value for name, value in known.items() if value is not None}
        words = {"words": more["words"]} if more.get("words") else {}
        return {"task": "transcribe", **said, "text": text, "segments": segments, **words, **usage_of(more)}

    def chunks(self, asked: Asked) -> Chunks:
        return _SpeechChunks(asked)


class _SpeechChunks(Chunks):
    def piece(self, piece: Any) -> Iterator[dict[str, Any]]:
        if text := self._made.add(piece):
            yield {"type": "transcript.text.delta", "delta": text}

    def end(self) -> Iterator[dict[str, Any]]:
        yield {"type": "transcript.text.done", "text": self._made.whole()["content"], **usage_of(self._made.more)}


# ---- all of them

_SPEECHES = {"embed": Embeddings, "chat": Chat, "transcribe": Transcriptions}


def speeches(model: Any, model_id: str) -> dict[str, Speech]:
    """The routes that a loaded model answers."""
    own = set(spoken(type(model)))
    return {
        path: _SPEECHES[method](getattr(model, method), model_id) for path, method in ROUTES.items() if method in own
    }


def _about(asked: Asked, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{asked.name}", "object": kind, "created": asked.created, "model": asked.model}
