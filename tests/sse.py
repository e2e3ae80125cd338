"""A reader of server-sent events for tests: one socket, no thread. Whoever does not `pump` is a slow client."""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any, Callable
from urllib.parse import quote, urlsplit

from tests.harness import PATIENCE


class _Fields(dict[str, Any]):
    def __missing__(self, name: str) -> None:
        return None


class Stream:
    """One open stream. `events` is all that came; `state` the newest of each object; `comments` the keep-alives."""

    def __init__(
        self,
        url: str,
        topics: str = "*",
        *,
        path: str = "/api/v1/events",
        last: str | None = None,
        headers: dict[str, str] | None = None,
        query: str = "",
        buffer: int | None = None,
    ) -> None:
        where = urlsplit(url)
        self._socket = socket.socket()
        if buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self._socket.settimeout(PATIENCE)
        self._socket.connect((where.hostname, where.port))
        lines = [f"GET {path}?topics={quote(topics)}{query} HTTP/1.1", f"Host: {where.netloc}"]
        lines += [f"Last-Event-ID: {last}"] if last is not None else []
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        self._socket.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        self.events: list[dict[str, Any]] = []
        self.state: dict[tuple[str, Any], dict[str, Any]] = {}
        self.comments = self.size = 0
        self.ended = self.complete = False  # complete: with the last chunk, not cut off
        self.last_id: str | None = None
        self._body = b""
        head = self._head()
        self.status = int(head.split(b" ", 2)[1])
        self.head = head.decode().lower()
        self._raw, self._raw_body = self._raw[len(head) + 4 :], b""
        self._feed(b"")

    def _head(self) -> bytes:
        self._raw = b""
        while b"\r\n\r\n" not in self._raw:
            data = self._socket.recv(4096)
            assert data, f"the node closed the connection after {self._raw!r}"
            self._raw += data
        return self._raw.partition(b"\r\n\r\n")[0]

    # ---- reading

    def pump(self, patience: float = 0.0) -> bool:
        """Take what has come; whether anything did."""
        if self.ended or not select.select([self._socket], [], [], patience)[0]:
            return False
        try:
            data = self._socket.recv(1 << 18)
        except ConnectionError:
            data = b""
        if not data:
            self.ended = True
            return False
        self.size += len(data)
        self._feed(data)
        return True

    def _feed(self, data: bytes) -> None:
        self._raw += data
        if "transfer-encoding: chunked" not in self.head:
            self._body, self._raw = self._body + self._raw, b""
            return
        while not self.ended:
            size, found, rest = self._raw.partition(b"\r\n")
            length = int(size, 16) if found else 0
            if not found or len(rest) < length + 2:
                break
            self._body += rest[:length]
            self._raw = rest[length + 2 :]
            self.ended = self.complete = length == 0
        *frames, self._body = self._body.split(b"\n\n")
        for frame in frames:
            self._take(frame.decode())

    def _take(self, frame: str) -> None:
        fields: dict[str, str] = {}
        for line in frame.splitlines():
            if line.startswith(":"):
                self.comments += 1
            else:
                name, _, value = line.partition(": ")
                fields[name] = value
        if "data" not in fields:
            return
        event = json.loads(fields["data"])
        event["id"] = fields.get("id")
        self.last_id = fields.get("id", self.last_id)
        self.events.append(event)
        if event.get("topic") == "stream" and event["type"] == "resync":
            self.state.clear()
        elif "topic" in event and event["type"] not in ("live", "resync"):
            value = event[[k for k in event if k not in ("topic", "type", "timestamp", "id")][0]]
            key = value.get("id") if event["topic"] in ("queue:jobs", "system:incidents") else None
            self.state[event["topic"], key] = value

    @property
    def body(self) -> Any:
        """The answer of a request that was refused."""
        while not self._body.endswith(b"}") and self.pump(PATIENCE):
            pass
        return json.loads(self._body)

    # ---- waiting

    def wait(self, found: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
        """Read until the condition holds; its value."""
        deadline = time.monotonic() + patience
        while not (value := found()):
            left = deadline - time.monotonic()
            assert left > 0, f"waited {patience:g} s in vain for {what}; last: {str(self.events[-3:])[:1500]}"
            assert not self.ended, f"the stream ended while waiting for {what}"
            self.pump(min(left, 0.5))
        return value

    def live(self) -> Stream:
        """Read until the snapshot, or what was missed, is over."""
        self.wait(lambda: any(e.get("type") == "live" for e in self.events), "the stream to be live")
        return self

    def wait_job(self, job: int, *statuses: str) -> dict[str, Any]:
        self.wait(lambda: self.job(job).get("status") in statuses, f"job {job} to be {statuses}")
        return self.job(job)

    def job(self, job: int) -> dict[str, Any]:
        return self.state.get(("queue:jobs", job), {})

    def of(self, topic: str) -> dict[str, Any]:
        """The object; each of its fields is None while it is not known, as in the middle of a resync."""
        return _Fields(self.state.get((topic, None), {}))

    def jobs(self) -> dict[int, str]:
        return {key: value["status"] for (topic, key), value in self.state.items() if topic == "queue:jobs"}

    def incidents(self) -> list[str]:
        return [value["text"] for (topic, _), value in self.state.items() if topic == "system:incidents"]

    def lines(self) -> list[str]:
        """Of a log that is followed."""
        return [line for event in self.events for line in event["lines"]]

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
