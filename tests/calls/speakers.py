"""Models that speak OpenAI's language, for the tests of its routes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import ostler
from ostler import Body, InputError, Ostler

app = Ostler()


@app.model("vectors", models=["org/minilm:v1", "shared"])
class Vectors:
    def load(self, model_id: str) -> None: ...

    def infer(self, payload: Any) -> object:
        return self.embed(payload, {})

    def embed(self, texts: list[str], options: dict[str, Any]) -> Any:
        found = [[float(len(text)), 0.5, -1.25] for text in texts]
        if options.get("user") == "counts":
            return {"embeddings": found, "usage": {"prompt_tokens": sum(map(len, texts))}}
        return found[1:] if "short" in texts else iter(found)


@app.model("talk", models=["smol", "shared"], queue=1)
class Talk:
    """Says the words of the last message back. Some words are commands."""

    def load(self, model_id: str) -> None: ...

    def infer(self, payload: Any) -> object:
        return "plain"

    def chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> Any:
        words = str(messages[-1]["content"]).split()
        if words[0] == "whole":
            return {"content": repr([messages, options]), "finish_reason": "length"}
        return self._say(words, options)

    def _say(self, words: list[str], options: dict[str, Any]) -> Any:
        for number, word in enumerate(words):
            command, _, path = word.partition("=")
            if command == "boom":
                raise RuntimeError("boom")
            if command == "bad":
                raise InputError("I do not say that")
            if command == "mark":
                with Path(path).open("a") as file:
                    file.write("run\n")
            if command == "wait":
                Path(f"{path}.begun").touch()
                try:
                    while not Path(path).exists():
                        if ostler.cancelled():
                            return
                        time.sleep(0.005)
                finally:
                    Path(f"{path}.left").touch()
            yield word if number == 0 else f" {word}"
        if options.get("user") == "counts":
            yield {"usage": {"prompt_tokens": 3, "completion_tokens": len(words)}}


@app.model("atalk", concurrency=4)
class AsyncTalk:
    def load(self, model_id: str) -> None: ...

    async def infer(self, payload: Any) -> object:
        return payload

    async def chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> Any:
        for letter in messages[-1]["content"]:
            await asyncio.sleep(0)
            if letter == "!":
                raise RuntimeError("boom")
            yield letter

    async def embed(self, texts: list[str], options: dict[str, Any]) -> Any:
        await asyncio.sleep(0)
        return [[1.0]] * len(texts)


@app.model("ears", batch=4)
class Ears:
    """Hears the size of the audio. Batches are for `infer_batch` alone."""

    def load(self, model_id: str) -> None: ...

    def infer_batch(self, payloads: list[Any]) -> list[Any]:
        return [1 for _ in payloads]

    def transcribe(self, audio: Body, options: dict[str, Any]) -> Any:
        text = f"{len(audio)} bytes of {audio.content_type} in {options.get('language', 'any language')}"
        if options.get("prompt") == "pieces":
            return iter(text.split(" "))
        if options.get("prompt") == "plain":
            return text
        segments = [{"start": 0.0, "end": 1.5, "text": text}]
        return {"text": text, "segments": segments, "language": "english"}


@app.model("mute")
class Mute:
    def load(self, model_id: str) -> None: ...

    def infer(self, payload: Any) -> object:
        return payload

    def chat(self, only: Any) -> object:  # another method of that name: it takes one argument
        return only


@app.model("zoo", any_model=True)
class Zoo:
    def load(self, model_id: str) -> None:
        self.model_id = model_id

    def infer(self, payload: Any) -> object:
        return self.model_id

    def chat(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        return self.model_id
