"""Who enqueues, uploads and pauses while the writes are recorded. Run as a program: actors.py ROLE COUNT [URL]."""

from __future__ import annotations

import sys
import time
import uuid
from typing import Any

from ostler import Ostler
from tests.harness import call
from tests.powercut.app import acknowledge, again, held, link, plain, summary


def singles(count: int) -> None:
    """Jobs one by one, and now and then a batch with a callback."""
    for number in range(count):
        token = uuid.uuid4().hex
        acknowledge("job", id=plain.enqueue(token=token), token=token)
        if number % 10 == 0:
            steps = [plain.s(token=f"{token}{n}") for n in range(5)]
            batch = _app().batch(steps, then=summary.s(token=token), into="result")
            acknowledge("batch", id=int(batch), jobs=batch.jobs, tokens=[f"{token}{n}" for n in range(5)])


def flows(count: int, url: str) -> None:
    """Chains, and jobs that publish several times, each waited for: in between nobody syncs the store."""
    for _ in range(count):
        token = uuid.uuid4().hex
        chain = link.s(token=token, n=1, of=3).then(link.s(token=token, n=2, of=3)).then(link.s(token=token, n=3, of=3))
        acknowledge("job", id=chain.enqueue(), token=token)
        token = uuid.uuid4().hex
        job = again.enqueue(token=token, runs=4)
        acknowledge("job", id=job, token=token)
        while call(url, "GET", f"/api/v1/jobs/{job}")[1]["status"] != "done":
            time.sleep(0.01)


def http(count: int, url: str) -> None:
    """Jobs, uploads and pauses over HTTP."""
    for number in range(count):
        token = uuid.uuid4().hex
        acknowledge(
            "job", id=_created(url, "/api/v1/jobs", {"task": "held", "args": {"token": token}})["id"], token=token
        )
        _upload(url, f"{number} is no video".encode() * 1000)
        verb = "resume" if number % 2 else "pause"
        acknowledge("asked", pool="held", paused=verb == "pause")
        status, answer = call(url, "POST", f"/api/v1/pools/held/{verb}")
        assert status == 200, answer
        acknowledge("pause", pool="held", paused=verb == "pause")


def _upload(url: str, file: bytes) -> None:
    edge = uuid.uuid4().hex
    parts = [
        f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="a.mp4"\r\n\r\n'.encode(),
        file,
        b"\r\n",
    ]
    for name, value in (("start", 0), ("end", 1)):
        parts.append(f'--{edge}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode())
    body = b"".join(parts) + f"--{edge}--\r\n".encode()
    job = _created(url, "/api/v1/clips", body, {"Content-Type": f"multipart/form-data; boundary={edge}"})
    token = job["args"]["source"].removeprefix("upload:")
    acknowledge("upload", job=job["id"], token=token, size=len(file), begins=file[:20].decode())


def _created(url: str, path: str, body: Any, headers: dict[str, str] | None = None) -> dict[str, Any]:
    status, answer = call(url, "POST", path, body, headers)
    assert status == 201, answer
    return dict(answer)


def _app() -> Ostler:
    from tests.powercut.app import app

    return app


if __name__ == "__main__":
    role, number, *rest = sys.argv[1:]
    {"singles": singles, "flows": flows, "http": http}[role](int(number), *rest)
