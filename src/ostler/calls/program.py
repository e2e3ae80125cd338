"""Models that somebody else's program serves over HTTP (`app.server`): how it is started, where it listens, when it is ready."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from ostler.calls.model import ModelSpec
from ostler.errors import NotFound
from ostler.lifecycle.probe import Probe, parse
from ostler.lifecycle.worker import Slot, Worker

_LONGEST_SOCKET = 107  # bytes, in the kernel


def socket_name(task: str, slot: Slot, generation: int) -> str:
    """Of a worker's socket in the run directory: never a part of a model's id."""
    return f"{task}.{slot.number}.{generation}.sock"


class Program:
    """One declared server."""

    def __init__(self, spec: ModelSpec, run: Path, interpreter: Callable[[str | None], Path]) -> None:
        self._spec, self._run, self._interpreter = spec, run, interpreter
        self._on_socket = any("{socket}" in text for text in (*spec.argv, *spec.variables.values()))

    def probe(self) -> Probe:
        """`http:/path` and `tcp:` are asked where it was told to listen; None means `tcp:` here, for a call needs one who listens."""
        text = self._spec.ready or "tcp:"
        if text != "tcp:" and not (text.startswith("http:/") and not text.startswith("http://")):
            return parse(text)
        kind, _, path = text.partition(":")
        return Probe(kind, f"{kind}://127.0.0.1:{{port}}{path}", "{socket}" if self._on_socket else "")

    def fills(self, slot: Slot) -> Mapping[str, str]:
        """What is put into its argv and variables beside `{port}` and `{n}`."""
        model, _ = json.loads(slot.key or "[]")
        return {"model": model, "socket": str(self._run / socket_name(self._spec.name, slot, slot.generation))}

    def argv(self, slot: Slot) -> list[str]:
        """Its program is looked for in its environment first."""
        model, _ = json.loads(slot.key or "[]")
        return [self.found(model) or self._spec.argv[0], *self._spec.argv[1:]]

    def found(self, model: str) -> str | None:
        """The program's path; None when there is none. Raises where its environment is not built."""
        name, options = self._spec.argv[0], self._spec.options(model)
        if options.env is not None:
            folder = self._interpreter(options.env).parent
            if os.sep not in name and (inside := shutil.which(name, path=str(folder))):
                return inside
        return shutil.which(name, path=self._spec.variables.get("PATH"))

    def check(self, model: str) -> None:
        """Raise NotFound when it cannot be started as it is declared."""
        if "{" not in self._spec.argv[0] and self.found(model) is None:
            raise NotFound(f"there is no program {self._spec.argv[0]!r} on this machine, or it may not be executed")
        longest = self._run / f"{self._spec.name}.9999.999999.sock"
        if self._on_socket and len(os.fsencode(longest)) > _LONGEST_SOCKET:
            raise NotFound(
                f"the path of its socket ({longest}) is longer than the system's {_LONGEST_SOCKET} bytes; "
                "use {port} instead, or a data directory with a shorter path"
            )

    def address(self, worker: Worker) -> str:
        """Where it is called: the name of a socket in the run directory, or `tcp:PORT`."""
        if self._on_socket:
            return socket_name(self._spec.name, worker.slot, worker.generation)
        return f"tcp:{(worker.metadata or {}).get('port', 0)}"

    def ended(self, worker: Worker) -> None:
        """It is gone: its socket, too."""
        if self._on_socket:
            with contextlib.suppress(OSError):
                (self._run / socket_name(self._spec.name, worker.slot, worker.generation)).unlink()
