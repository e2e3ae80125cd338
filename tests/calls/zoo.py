"""Models for the tests: an ordinary user's file. It must also run under Python 3.9 with nothing of Ostler installed."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from pathlib import Path

import ostler
from ostler import Body, InputError, Job, Ostler, Retry

app = Ostler()
app.pool("work", workers=1)

NOTES = Path(os.environ.get("ZOO_NOTES", "."))


def note(name: str, text: str = "") -> None:
    """Whole or not at all, for whoever looks."""
    new = NOTES / f"{name}.{threading.get_ident()}"
    new.write_text(text)
    new.replace(NOTES / name)


def wait_for(name: str) -> None:
    deadline = time.monotonic() + 60
    while not (NOTES / name).exists():
        assert time.monotonic() < deadline, f"waited in vain for {name}"
        time.sleep(0.002)


@app.job(queue="work")
def job(job: Job, number: int) -> int:
    if number < 0:
        raise Retry("no")
    return number


app.cron("nightly", "0 3 * * *", job.s(number=1))


class Plain:
    def load(self, model_id):
        self.model_id = model_id


@app.model("echo", models={"m": {}, "org/big:7b": {}})
class Echo(Plain):
    def infer(self, payload):
        return payload


class Number:
    """As numpy's: not JSON, but knows how to become it."""

    def __init__(self, value):
        self._value = value

    def tolist(self):
        return self._value


@app.model("odd")
class Odd(Plain):
    """Answers by what it is asked."""

    def infer(self, payload):
        return getattr(self, "do_" + payload["do"])(payload)

    def do_nothing(self, payload):
        return None

    def do_raise(self, payload):
        raise RuntimeError("the model broke: " + "é")

    def do_input(self, payload):
        raise InputError("text is missing")

    def do_bad_text(self, payload):
        class Bad(Exception):
            def __str__(self):
                raise ValueError

        raise Bad

    def do_bad_object(self, payload):
        class Bad:
            def __getattr__(self, name):
                raise RuntimeError("hands off")

        return Bad()

    def do_awaitable(self, payload):
        class Later:
            def __await__(self):
                yield

        return Later()

    def do_closed_log(self, payload):
        sys.stderr.close()
        raise RuntimeError("silent")

    def do_fork(self, payload):
        child = os.fork()
        if not child:
            note("forked")
            while True:
                time.sleep(0.01)
        wait_for("forked")
        os.kill(child, 15)
        return os.waitpid(child, 0)[1] >> 8

    def do_exit(self, payload):
        sys.exit(3)

    def do_memory(self, payload):
        raise MemoryError("no more")

    def do_cuda(self, payload):
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 GiB")

    def do_nan(self, payload):
        return {"scores": [1.0, float("nan")]}

    def do_bytes_inside(self, payload):
        return {"image": b"abc"}

    def do_numbers(self, payload):
        return {"vector": Number([1.5, 2.5]), "n": Number(3)}

    def do_numbers_nan(self, payload):
        return Number([float("inf")])

    def do_key(self, payload):
        return {(1, 2): 3}

    def do_deep(self, payload):
        value = []
        for _ in range(100_000):
            value = [value]
        return value

    def do_bytes(self, payload):
        return b"\x00\x01raw"

    def do_body(self, payload):
        return Body(b"<svg/>", "image/svg+xml")

    def do_bad_type(self, payload):
        return Body(b"", "image/png\r\nx: y")

    def do_large(self, payload):
        return "x" * payload["size"]

    def do_deadline(self, payload):
        return ostler.deadline()

    def do_coroutine(self, payload):
        async def later():
            return 1

        return later()

    def do_thread(self, payload):
        return threading.current_thread() is threading.main_thread()

    def do_modules(self, payload):
        return {"ostler": sys.modules["ostler"].__file__, "path": sys.path, "env": dict(os.environ)}

    def do_generate(self, payload):
        return iter([1, 2])


@app.model("raw")
class Raw(Plain):
    def infer(self, payload):
        if not isinstance(payload, Body):
            return {"kind": type(payload).__name__}
        return {
            "size": len(payload.data),
            "sum": sum(payload.data[:1000]),
            "type": payload.content_type,
            "filename": payload.filename,
            "fields": payload.fields,
            "files": {name: len(file.view) for name, file in payload.files.items()},
        }


@app.model("slow", models=["m"])
class Slow(Plain):
    """Looks whether it is cancelled."""

    def infer(self, payload):
        if payload.get("quick"):
            return "quick"
        note(payload["begun"])
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if ostler.cancelled() and not payload.get("deaf"):
                note(payload["seen"])
                return "cancelled"
            if "go" in payload and (NOTES / payload["go"]).exists():
                return "finished"
            time.sleep(0.002)
        return "nobody hung up"


@app.model("count")
class Count(Plain):
    def infer(self, payload):
        try:
            for number in range(payload["to"]):
                if number == payload.get("fail_at"):
                    raise RuntimeError("no more numbers")
                yield (b"x" * payload["size"]) if "size" in payload else {"n": number}
                note("yielded", str(number))
        finally:
            note("closed", "cancelled" if ostler.cancelled() else "")


@app.model("kept")
class Kept(Count):
    """Holds on to its generators: nobody but the server ends them."""

    def infer(self, payload):
        self.last = super().infer(payload)
        return self.last


@app.model("stream_odd")
class StreamOdd(Plain):
    def infer(self, payload):
        if payload == "first":
            raise InputError("no such thing")
        if payload == "nan":
            yield float("nan")
        if payload == "empty":
            return
        yield 1
        yield float("nan")


@app.model("acount", concurrency=4)
class AsyncCount(Plain):
    async def infer(self, payload):
        try:
            for number in range(payload["to"]):
                if number == payload.get("fail_at"):
                    raise RuntimeError("no more numbers")
                await asyncio.sleep(0)
                yield (b"x" * payload["size"]) if "size" in payload else {"n": number}
                note("yielded", str(number))
        finally:
            note("closed")


@app.model("aslow", concurrency=2)
class AsyncSlow(Plain):
    async def load(self, model_id):
        self.loop = asyncio.get_running_loop()

    async def infer(self, payload):
        assert self.loop is asyncio.get_running_loop()
        if payload.get("quick"):
            return "quick"
        if payload.get("raise"):
            raise RuntimeError("broken")
        note(payload["begun"])
        try:
            while not (NOTES / payload.get("go", "never")).exists():
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            note(payload["seen"], str(ostler.cancelled()))
            raise
        return "finished"


@app.model("batch", batch=8)
class Batched(Plain):
    def load(self, model_id):
        self.sizes = []

    def infer_batch(self, payloads):
        self.sizes.append(len(payloads))
        if payloads == ["sizes"]:
            return [self.sizes]
        if "hold" in payloads:
            note("held")
            wait_for("let go")
        for payload in payloads:
            if str(payload).startswith("gate"):
                note(payload)
                wait_for(f"open {payload}")
        if "all" in payloads:
            raise RuntimeError("the whole batch")
        if "few" in payloads:
            return payloads[1:]
        return [ValueError("one") if p == "one" else InputError("bad") if p == "bad" else p for p in payloads]


@app.model("abatch", batch=8)
class AsyncBatched(Batched):
    async def infer_batch(self, payloads):
        await asyncio.sleep(0)
        if "hold" in payloads:
            note("held")
            while not (NOTES / "let go").exists():
                await asyncio.sleep(0.002)
            payloads = ["" if p == "hold" else p for p in payloads]
        return super().infer_batch(payloads)


@app.model("only_batch")
class OnlyBatch(Plain):
    def infer_batch(self, payloads):
        return [p * 2 for p in payloads]


@app.model("loads", any_model=True)
class Loads:
    """Loads as its id says."""

    def load(self, model_id):
        print("loading", model_id)
        if model_id == "broken":
            raise OSError("weights.bin is not there")
        if model_id == "exits":
            sys.exit("bye")
        if model_id == "steps":
            for step in range(5):
                yield step / 4
                time.sleep(0.06)
        if model_id == "tells":
            ostler.loading_progress(0.5)
        if model_id == "wrong":
            yield "half"
        if model_id == "waits":
            note("loading")
            yield 0.25
            wait_for("go on")
        if model_id == "bad example":
            self.example = {"fail": True}
        if model_id == "example":
            self.example = {"note": "example ran"}

    def infer(self, payload):
        if payload.get("fail"):
            raise RuntimeError("cannot infer")
        note(payload["note"])
        return "ok"

    def unload(self):
        note("unloaded")

    def park(self):
        note("parked")

    def wake(self):
        if self.__dict__.get("woken"):
            raise RuntimeError("will not wake twice")
        self.woken = True
