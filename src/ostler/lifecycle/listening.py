"""Programs that are told where to listen: `{port}` and `{socket}` in their arguments, when they are ready, and where they are reached."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ostler.errors import NotFound
from ostler.lifecycle.probe import Probe, parse
from ostler.lifecycle.worker import Slot, Worker

_LONGEST_SOCKET = 107  # bytes, in the kernel


def socket_name(pool: str, slot: Slot, generation: int) -> str:
    """Of a worker's socket in the run directory."""
    return f"{pool}.{slot.number}.{generation}.sock"


class Listening:
    """The workers of one pool. `texts` are its arguments and variables."""

    def __init__(self, pool: str, run: Path, texts: Iterable[str], ready: str | None) -> None:
        self._pool, self._run, self._ready = pool, run, ready
        self._on_socket = any("{socket}" in text for text in texts)

    def probe(self) -> Probe:
        """`http:/path` and `tcp:` are asked where it was told to listen; None means `tcp:` here, for somebody must listen there."""
        text = self._ready or "tcp:"
        if text != "tcp:" and not (text.startswith("http:/") and not text.startswith("http://")):
            return parse(text)
        kind, _, path = text.partition(":")
        return Probe(kind, f"{kind}://127.0.0.1:{{port}}{path}", "{socket}" if self._on_socket else "")

    def fills(self, slot: Slot) -> Mapping[str, str]:
        """What is put into its argv and variables beside `{port}` and `{n}`."""
        return {"socket": str(self._run / socket_name(self._pool, slot, slot.generation))}

    def check_socket(self) -> None:
        """Raise NotFound when the system cannot have a socket there."""
        longest = self._run / f"{self._pool}.9999.999999.sock"
        if self._on_socket and len(os.fsencode(longest)) > _LONGEST_SOCKET:
            raise NotFound(
                f"the path of its socket ({longest}) is longer than the system's {_LONGEST_SOCKET} bytes; "
                "use {port} instead, or a data directory with a shorter path"
            )

    def address(self, worker: Worker) -> str:
        """Where it is reached: the name of a socket in the run directory, or `tcp:PORT`."""
        if self._on_socket:
            return socket_name(self._pool, worker.slot, worker.generation)
        return f"tcp:{(worker.metadata or {}).get('port', 0)}"

    def ended(self, worker: Worker) -> None:
        """It is gone: its socket, too."""
        if self._on_socket:
            with contextlib.suppress(OSError):
                (self._run / socket_name(self._pool, worker.slot, worker.generation)).unlink()
