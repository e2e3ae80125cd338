"""A helper process that moves the device memory of another process to the host and back: `python -m ostler.lifecycle.checkpoint`.

The driver does that for any CUDA process, without its help (cuCheckpointProcess*, from driver 570 on). Nothing else may call into the
driver for a process that is not its own, so a driver that hangs or crashes takes this helper and not the node. Standard library.

    probe          whether the driver can do it
    park PID       lock, copy to the host, release the device
    wake PID       copy back, unlock

Prints one line of JSON: {"ms": …} or {"error": …}. With OSTLER_FAKE_GPUS and `"checkpoint": {…}` in that file, the fake devices are
parked and woken instead; {"park": "text"} or {"wake": "text"} there has it fail with that.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

_LOCK_MS = 10_000  # a process whose running kernels have not ended by then is not parked
PARKED = ".parked"


class Trouble(Exception):
    """The driver does not do it."""


class Driver:
    """libcuda, as far as this needs it."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise Trouble(f"there is no CUDA driver: {error}") from None
        if not hasattr(self._cuda, "cuCheckpointProcessLock"):
            raise Trouble("the CUDA driver cannot checkpoint processes (that came with driver 570)")
        self._check("cuInit", self._cuda.cuInit(0))

    def _check(self, what: str, code: int) -> None:
        if code:
            said = ctypes.c_char_p()
            self._cuda.cuGetErrorString(code, ctypes.byref(said))
            raise Trouble(f"{what}: {(said.value or b'').decode()} ({code})")

    def _do(self, step: str, pid: int, first: int = 0) -> None:
        arguments = (ctypes.c_uint32 * 16)(first)  # 64 bytes, zeros but for a lock's patience
        self._check(step, getattr(self._cuda, f"cuCheckpointProcess{step}")(pid, ctypes.byref(arguments)))

    def park(self, pid: int) -> None:
        """All or nothing: a process that cannot be parked runs on."""
        self._do("Lock", pid, _LOCK_MS)
        try:
            self._do("Checkpoint", pid)
        except Trouble:
            self._do("Unlock", pid)
            raise

    def wake(self, pid: int) -> None:
        self._do("Restore", pid)
        self._do("Unlock", pid)


class Fake:
    """The fake devices of tests: a file UUID.PID is the memory of a process."""

    def __init__(self, path: Path) -> None:
        told = json.loads(path.read_text())
        self._told = told.get("checkpoint")
        if self._told is None:
            raise Trouble("these fake GPUs cannot be parked")
        self._folder = path.parent / told.get("folder", "used")

    def _move(self, which: str, end: str, *, away: bool) -> None:
        if why := self._told.get(which):
            raise Trouble(why)
        for path in self._folder.glob(f"*{end}"):
            path.rename(path.with_name(path.name + PARKED if away else path.name.removesuffix(PARKED)))

    def park(self, pid: int) -> None:
        self._move("park", f".{pid}", away=True)

    def wake(self, pid: int) -> None:
        self._move("wake", f".{pid}{PARKED}", away=False)


def _driver() -> Driver | Fake:
    fake = os.environ.get("OSTLER_FAKE_GPUS")
    return Fake(Path(fake)) if fake else Driver()


def main(argv: list[str]) -> int:
    """Do it, and say how it went."""
    began = time.perf_counter()
    try:
        driver = _driver()
        todo: dict[str, Callable[[int], None]] = {"probe": lambda _: None, "park": driver.park, "wake": driver.wake}
        todo[argv[0]](int(argv[1]) if len(argv) > 1 else 0)
    except (Trouble, OSError, ValueError, LookupError) as error:
        print(json.dumps({"error": str(error) or type(error).__name__}), flush=True)  # noqa: T201
        return 1
    print(json.dumps({"ms": round((time.perf_counter() - began) * 1000, 1)}), flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
