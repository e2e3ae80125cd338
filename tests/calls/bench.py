"""A model's worker on the bench: started as the node starts it, with a control channel, spoken to over its real socket."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ostler.calls.launch import launch
from ostler.calls.model import ModelOptions
from ostler.lifecycle.wire import Frames, encode

# Another interpreter for all workers, as an environment of its own; nothing of Ostler need be installed there.
PYTHON = os.environ.get("OSTLER_BENCH_PYTHON", sys.executable)
ZOO = Path(__file__).parent / "zoo.py"
PATIENCE = float(os.environ.get("BENCH_PATIENCE", "60"))


def until(found: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (value := found()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)
    return value


class Answer:
    def __init__(self, status: int, headers: dict[str, str], body: bytes, whole: bool = True) -> None:
        self.status, self.headers, self.body, self.whole = status, headers, body, whole

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def result(self) -> Any:
        assert self.status == 200, (self.status, self.body[:500])
        return self.json["result"]

    @property
    def error(self) -> tuple[int, str, str]:
        return self.status, self.json["error"]["code"], self.json["error"]["message"]


class Client:
    """One connection."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            self.socket.connect(f"/proc/self/fd/{folder}/{path.name}")  # however long the path is
        finally:
            os.close(folder)
        self._data = b""

    def send(self, path: str, body: bytes = b"", method: str = "POST", **headers: str) -> None:
        lines = [f"{method} {path} HTTP/1.1", "host: worker", f"content-length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1") + body)

    def start(self, payload: Any, **headers: str) -> None:
        """Send a call, and do not wait for its answer."""
        headers.setdefault("content_type", "application/json")
        self.send("/infer", json.dumps({"payload": payload}).encode(), **headers)

    def call(self, payload: Any, **headers: str) -> Answer:
        self.start(payload, **headers)
        return self.answer()

    def get(self, path: str) -> Answer:
        self.send(path, method="GET")
        return self.answer()

    def post(self, path: str, body: bytes = b"", **headers: str) -> Answer:
        self.send(path, body, **headers)
        return self.answer()

    def answer(self) -> Answer:
        head = self._to(b"\r\n\r\n").decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        headers = {n.lower(): v.strip() for n, _, v in (line.partition(":") for line in lines)}
        status = int(first.split()[1])
        if status == 100:
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return self._chunks(status, headers)
        if "content-length" not in headers:
            while self._more():
                pass
            body, self._data = self._data, b""
            return Answer(status, headers, body)
        return Answer(status, headers, self._count(int(headers["content-length"])))

    def _chunks(self, status: int, headers: dict[str, str]) -> Answer:
        body = b""
        while True:
            try:
                size = int(self._to(b"\r\n"), 16)
                body += self._count(size)
                self._to(b"\r\n")
            except EOFError:
                return Answer(status, headers, body, whole=False)
            if not size:
                return Answer(status, headers, body)

    def _more(self) -> bool:
        data = self.socket.recv(1 << 20)
        self._data += data
        return bool(data)

    def _to(self, mark: bytes) -> bytes:
        while mark not in self._data:
            if not self._more():
                raise EOFError(self._data)
        found, _, self._data = self._data.partition(mark)
        return found

    def _count(self, size: int) -> bytes:
        while len(self._data) < size:
            if not self._more():
                raise EOFError(self._data)
        found, self._data = self._data[:size], self._data[size:]
        return found

    def ended(self) -> bool:
        """Wait for the worker to close it; whether it did so without another byte."""
        try:
            return not self._data and self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self.socket.close()

    __del__ = close  # a test that has no more use for it need not say so


class Bench:
    """One worker process."""

    def __init__(self, folder: Path, task: str, model_id: str, target: str, python: str, **given: Any) -> None:
        self.folder = folder
        self.log = folder / "log"
        known = {f.name for f in dataclasses.fields(ModelOptions)}
        options = ModelOptions(**{k: v for k, v in given.items() if k in known})
        argv = launch(
            python, target, task, model_id, options, run=str(folder), socket="w.0.1.sock",
            **({"max_body": given["max_body"]} if "max_body" in given else {}),
        )  # fmt: skip
        self.channel, theirs = socket.socketpair()
        env = {**os.environ, "ZOO_NOTES": str(folder), **given.get("environ", {})}
        env["OSTLER_CONTROL"] = f"{theirs.fileno()}:0.05"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                argv, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
                start_new_session=True, cwd=given.get("cwd", "/"),
            )  # fmt: skip
        theirs.close()
        self.frames: list[list[Any]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        frames = Frames()
        try:
            while data := self.channel.recv(65536):
                self.frames.extend(frames.feed(data))
        except OSError:
            pass

    def heard(self, kind: str) -> list[list[Any]]:
        return [frame for frame in list(self.frames) if frame[0] == kind]

    def wait(self, kind: str) -> list[Any]:
        """The first frame of that kind."""
        until(lambda: self.heard(kind) or self.process.poll() is not None, kind)
        if not self.heard(kind):
            self._reader.join(5)
        assert self.heard(kind), f"it ended with {self.process.poll()}: {self.printed()}"
        return self.heard(kind)[0]

    def say(self, *frame: Any) -> None:
        self.channel.sendall(encode(list(frame)))

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def noted(self, name: str) -> str:
        path = self.folder / name
        until(path.exists, f"the model to note {name}")
        return path.read_text()

    def note(self, name: str) -> None:
        (self.folder / name).touch()

    def printed(self) -> str:
        return self.log.read_text(errors="replace")

    def client(self) -> Client:
        return Client(self.folder / "w.0.1.sock")

    def call(self, payload: Any, **headers: str) -> Answer:
        client = self.client()
        try:
            return client.call(payload, **headers)
        finally:
            client.close()

    def get(self, path: str) -> Answer:
        client = self.client()
        try:
            return client.get(path)
        finally:
            client.close()

    def ended(self) -> int:
        return self.process.wait(PATIENCE)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.channel.close()


@contextmanager
def worker(
    folder: Path, task: str, model_id: str = "m", *, ready: bool = True, target: str = str(ZOO), python: str = PYTHON, **given: Any,
) -> Iterator[Bench]:  # fmt: skip
    if python != sys.executable:
        given.setdefault("env", "other")
    bench = Bench(folder, task, model_id, target, python, **given)
    try:
        if ready:
            bench.wait("ready")
        yield bench
    finally:
        bench.close()
