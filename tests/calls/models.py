"""Models for the tests of calls: quick to load, and as odd as models can be."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import ostler
from ostler import Body, Ostler

app = Ostler()


def wait_for(path: str) -> None:
    while not Path(path).exists():
        if ostler.cancelled():
            raise RuntimeError("cancelled")
        time.sleep(0.005)


@app.model("echo", models=["echo", "org/big:7b"])
class Echo:
    def load(self, model_id: str) -> None:
        self.model_id = model_id

    def infer(self, payload: object) -> object:
        return {"payload": payload, "model": self.model_id, "pid": os.getpid()}


@app.model("fleeting", idle=0.02, queue=1000)
class Fleeting:
    """Hardly there, and gone again. Each call leaves a line."""

    def load(self, model_id: str) -> None: ...

    def infer(self, payload: dict[str, str]) -> object:
        with open(payload["marks"], "a", encoding="ascii") as file:  # noqa: PTH123
            file.write(f"{payload['n']}\n")
        return payload["n"]


@app.model("slow", queue=2, idle=60, timeout=60)
class Slow:
    """Waits for a file, and says that it does."""

    def load(self, model_id: str) -> None: ...

    def infer(self, payload: dict[str, str]) -> object:
        if begun := payload.get("begun"):
            Path(begun).touch()
        try:
            wait_for(payload["go"])
        except RuntimeError:
            Path(payload["go"] + ".cancelled").touch()
            raise
        return os.getpid()


@app.model("stuck", timeout=0.5)
class Stuck:
    def load(self, model_id: str) -> None: ...

    def infer(self, payload: float) -> object:
        time.sleep(payload)
        return os.getpid()


@app.model("wide", concurrency=4)
class Wide:
    def load(self, model_id: str) -> None: ...

    def infer(self, payload: dict[str, str]) -> object:
        Path(payload["begun"]).touch()
        wait_for(payload["go"])
        return os.getpid()


@app.model("two", workers=2)
class Two:
    def load(self, model_id: str) -> None: ...

    def infer(self, payload: dict[str, str]) -> object:
        Path(payload["begun"]).touch()
        wait_for(payload["go"])
        return os.getpid()


@app.model("words")
class Words:
    def load(self, model_id: str) -> None: ...

    def infer(self, payload: dict[str, str]):
        for word in payload["text"].split():
            if word == "boom":
                raise RuntimeError("boom")
            if word == "wait":
                wait_for(payload["go"])
            yield word


@app.model("negative")
class Negative:
    """Bytes to bytes; with fields, what the form had."""

    def load(self, model_id: str) -> None: ...

    def infer(self, payload: Body) -> object:
        if payload.fields or payload.files:
            files = {name: [file.filename, file.content_type, len(file)] for name, file in payload.files.items()}
            return {"fields": payload.fields, "files": files}
        return Body(bytes(255 - value for value in payload.view), payload.content_type)


@app.model("drip")
class Drip:
    """A stream of bytes, which waits for a file in the middle."""

    def load(self, model_id: str) -> None: ...

    def infer(self, payload: dict[str, str]):
        yield b"one"
        if "go" in payload:
            wait_for(payload["go"])
        yield b"two"


@app.model("heavy")
class Heavy:
    """Loads until a file says so."""

    def load(self, model_id: str) -> None:
        flag = os.environ.get("HEAVY_GO")
        while flag and not Path(flag).exists():
            time.sleep(0.005)

    def infer(self, payload: object) -> object:
        return "loaded"


@app.model("broken")
class Broken:
    """Cannot be loaded until somebody mends it."""

    def load(self, model_id: str) -> None:
        if not os.environ.get("MENDED") or not Path(os.environ["MENDED"]).exists():
            raise RuntimeError("no such file: weights.bin")

    def infer(self, payload: object) -> object:
        return "mended"


@app.model("zoo", any_model=True, max_models=2)
class Zoo:
    def load(self, model_id: str) -> None:
        self.model_id = model_id

    def infer(self, payload: object) -> object:
        return self.model_id


@app.model("large", models=["one", "two", "never"], gpu_mb=700, idle=600)
class Large:
    """Two of these do not fit on the tests' GPU of 1000 MB."""

    def load(self, model_id: str) -> None:
        self.model_id = model_id
        (Path(os.environ["TEST_GPU_USED"]) / f"GPU-0.{os.getpid()}").write_text("700")

    def infer(self, payload: object) -> object:
        if isinstance(payload, dict):
            Path(payload["begun"]).touch()
            wait_for(payload["go"])
        return self.model_id


app.server("llm", ["llama-server", "--port", "{port}"])


@app.job()
def add(job, a: int = 0) -> int:
    return a + 1


@app.job()
def ask(job, task: str, model: str | None = None, payload: object = None) -> object:
    """A job that calls a model."""
    return app.call_sync(task, model, payload)


@app.job()
async def ask_all(job, task: str, model: str, payloads: list) -> object:
    async with asyncio.TaskGroup() as group:
        found = [group.create_task(app.call(task, model, payload)) for payload in payloads]
    return [one.result() for one in found]
