"""`ostler demo models`: real models that load, stay warm, make room for each other, and are killed in the middle of a call."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ostler import app as apps
from ostler import config, envs
from ostler.apps.models import pretended
from ostler.cli import client, show
from ostler.config import Settings
from ostler.errors import OstlerError

TARGET = "ostler.apps.models.pretended"
_TEXTS = ["The dog sleeps on the sofa.", "A puppy is lying on the couch.", "Shares fell sharply on Monday."]
_SIGN = "STABLE RULES\nfeed first,\nride later"
_WIDE = 30  # characters of the memory bar
_PATIENCE = 60.0

# Run in the models' environment, which has what draws pictures.
_DRAW = """
import sys
from PIL import Image, ImageDraw, ImageFont
picture = Image.new("RGB", (480, 320), "white")
ImageDraw.Draw(picture).text((40, 60), sys.argv[2], fill="black", font=ImageFont.load_default(44))
picture.save(sys.argv[1])
"""


def prepare(folder: Path) -> dict[str, str]:
    """Build the models' environment if need be, draw a picture, describe the GPU; the variables for the node."""
    place = os.environ.get("OSTLER_ENV_DIR") or str(folder.absolute().with_name(f"{folder.name}-envs"))
    known = config.load({"data": str(folder), "env_dir": place})
    app = apps.load(TARGET)
    if envs.look(known, app, "light").state != "ready":
        print(f"installing the packages of the models into {place}, about 600 MB; this is done once …")
    built = envs.build(known, app, "light", tell=_progress)
    gpu = folder / "gpu.json"
    gpu.write_text(json.dumps(pretended.GPU))
    subprocess.run([str(built.interpreter), "-c", _DRAW, str(folder / "sign.png"), _SIGN], check=True)
    return {"OSTLER_ENV_DIR": place, "OSTLER_FAKE_GPUS": str(gpu.absolute()), "OSTLER_GPU_HEADROOM_MB": "0"}


def _progress(line: str) -> None:
    if line.startswith("$ ") or "is ready: " in line:
        print(f"  {show.harmless(line)[:110]}", flush=True)


def run(known: Settings, folder: Path) -> None:
    """The story; raises SystemExit when it does not end well."""
    shown = _Story(known)
    picture = base64.b64encode((folder / "sign.png").read_bytes()).decode()
    shown.title("A cold call: the process starts, loads the model, answers")
    cold = shown.call("embedding", {"texts": _TEXTS}, _alike)
    shown.title("A warm call: the same process, no load")
    warm = shown.call("embedding", {"texts": _TEXTS}, _alike)
    print(f"  {cold / max(warm, 0.001):.0f} times faster than the cold one")
    shown.memory()
    total, each = pretended.TOTAL_MB, pretended.EACH_MB
    shown.title(f"Two models of {each} MB each, a pretended GPU of {total} MB: the idle one leaves")
    shown.call("ocr", {"image": picture}, lambda found: "it reads: " + ", ".join(found["text"].split("\n")))
    shown.evicted("embedding")
    shown.memory()
    shown.call("embedding", {"texts": _TEXTS[:1]}, lambda found: f"a vector of {found['dimensions']} numbers")
    shown.evicted("ocr")
    shown.memory()
    shown.title("kill -9 in the middle of a call")
    shown.kill("embedding", {"texts": [f"{_TEXTS[0]} " * 40] * 256})
    shown.title("The next call: a new process answers")
    shown.call("embedding", {"texts": _TEXTS}, _alike)
    print(f"\n{shown.answered} calls answered, 1 cut off by kill -9 and told so, 2 evictions, no call lost.")


class _Story:
    def __init__(self, known: Settings) -> None:
        self._known = known
        self._number = 0
        self.answered = 0

    def title(self, text: str) -> None:
        self._number += 1
        print(f"\n{self._number}. {text}")

    def call(self, task: str, payload: Any, said: Callable[[Any], str]) -> float:
        """Call it, and show what came of it; the milliseconds."""
        began = time.monotonic()
        found = self._ask(task, payload)
        spent = (time.monotonic() - began) * 1000
        self.answered += 1
        pid = self._worker(task)["pid"]
        print(
            f"  {task:<10} {spent:>7.0f} ms  ({found['processing_time_ms']:.0f} ms in the model, pid {pid}): {said(found['result'])}"
        )
        return spent

    def evicted(self, task: str) -> None:
        _until(lambda: self._states()[task]["state"] == "IDLE", f"{task} to leave")
        print(f"  {task} was unloaded to make room; the next call loads it again")

    def memory(self) -> None:
        """The pretended GPU as a bar."""
        held = [task for task, told in self._states().items() if told["state"] in ("READY", "BUSY")]
        filled = round(_WIDE * len(held) * pretended.EACH_MB / pretended.TOTAL_MB)
        used = len(held) * pretended.EACH_MB
        print(
            f"  GPU [{'█' * filled}{'·' * (_WIDE - filled)}] {used} of {pretended.TOTAL_MB} MB: {', '.join(held) or 'empty'}"
        )

    def kill(self, task: str, payload: Any) -> None:
        """Kill its process while it computes; the caller must be told."""
        told: list[tuple[float, str]] = []

        def ask() -> None:
            try:
                self._ask(task, payload)
                told.append((time.monotonic(), "an answer, before it could be killed"))
            except OstlerError as error:
                told.append((time.monotonic(), str(error)))

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        _until(lambda: told or self._states()[task]["state"] == "BUSY", f"{task} to be busy")
        pid = self._worker(task)["pid"]
        killed = time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        print(f"  --> kill -9 {pid}: {task} dies while it computes {len(payload['texts'])} long texts")
        thread.join(_PATIENCE)
        if not told or "ended during the call" not in told[0][1]:
            print(f"  the caller was told: {told or 'nothing'}", file=sys.stderr)
            raise SystemExit(1)
        print(f"  its caller was told {(told[0][0] - killed) * 1000:.0f} ms later: {told[0][1][:180]}")

    def _ask(self, task: str, payload: Any) -> Any:
        return client.request(self._known, "POST", f"/api/v1/calls/{task}", {"payload": payload})

    def _states(self) -> dict[str, Any]:
        models = client.request(self._known, "GET", "/api/v1/health")["models"]
        return {name.partition(":")[0]: told for name, told in models.items()}

    def _worker(self, task: str) -> dict[str, Any]:
        found = client.request(self._known, "GET", "/api/v1/workers")["workers"]
        return next(dict(worker) for worker in found if worker["pool"] == task)


def _alike(found: Any) -> str:
    """How near the second and the third text are to the first."""
    first, *others = found["embeddings"]
    near = [sum(a * b for a, b in zip(first, other, strict=True)) for other in others]
    return f"dog/puppy {near[0]:.2f}, dog/shares {near[1]:.2f}"


def _until(found: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not found():
        if time.monotonic() > deadline:
            print(f"  gave up after waiting {_PATIENCE:g} s for {what}", file=sys.stderr)
            raise SystemExit(1)
        time.sleep(0.02)
