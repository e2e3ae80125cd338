"""Models for the tests of the Calls page: each answers with another kind of thing."""

from __future__ import annotations

import io
import struct
import time
import wave
import zlib
from pathlib import Path

import ostler
from ostler import Body, Ostler

app = Ostler()
app.env("never", requirements=["nothing-of-this-name==1.0"])

ODD = "<img src=x onerror='window.hacked=1'>"


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png() -> bytes:
    """A red square."""
    head = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\xff\0\0" * 8) * 8)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def wav() -> bytes:
    """A tenth of a second of silence."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(1600))
    return out.getvalue()


@app.model("echo", models=["plain", ODD], memory_mb=20)
class Echo:
    def load(self, model_id: str) -> None:
        print("loaded", model_id, flush=True)

    def infer(self, payload: object) -> object:
        if isinstance(payload, Body):
            return {"kind": payload.content_type, "size": len(payload.data)}
        return {"echo": payload}


@app.model("gives")
class Gives:
    def load(self, model_id: str) -> None: ...

    def infer(self, payload: str) -> object:
        return Body(png(), "image/png") if payload == "image" else Body(wav(), "audio/wav")


@app.model("words")
class Words:
    def load(self, model_id: str) -> None: ...

    def infer(self, payload: str):
        for word in payload.split():
            if word == "boom":
                raise RuntimeError("it broke")
            yield f"{word} "


@app.model("slow")
class Slow:
    def load(self, model_id: str) -> None: ...

    def infer(self, payload: dict[str, str]) -> object:
        while not Path(payload["go"]).exists() and not ostler.cancelled():
            time.sleep(0.005)
        return "gone on"


@app.model("apart", env="never")
class Apart:
    def load(self, model_id: str) -> None: ...

    def infer(self, payload: object) -> object: ...
