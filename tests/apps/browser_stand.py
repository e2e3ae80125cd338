"""A worker's browsers without a node: the declared class is driven as the worker's program drives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ostler import ConfigError, Endpoint
from ostler.app import Ostler
from ostler.apps.browsers import installed
from ostler.apps.browsers.place import Place
from ostler.apps.browsers.pools import browsers
from ostler.sessions.handle import Session, SessionWorker

PATIENCE = 30.0


class Stand:
    """One worker of a pool. `said` is what it has told the node."""

    def __init__(self, code: Any, scratch: Path, slots: int) -> None:
        self.code, self.scratch = code, scratch
        self.said: list[tuple[Any, ...]] = []
        self.worker = SessionWorker(
            "worker:test:0", 1, str(scratch / "private" / "s"), scratch, slots, lambda *frame: self.said.append(frame)
        )
        self.endpoint = Endpoint("")

    def session(self, name: str) -> Session:
        return Session(name, "user:0", "", "", "", None, lambda *frame: self.said.append(frame))

    @property
    def folders(self) -> int:
        """Profiles and other directories of browsers: three for each that runs."""
        return sum(entry.is_dir() for entry in (self.scratch / "b").iterdir())

    async def heard(self, *frame: Any) -> None:
        await until(lambda: frame in self.said, f"{frame} among {self.said}")


@pytest.fixture(scope="module", autouse=True)
def adapted() -> Iterator[None]:
    """Where root has the project in a directory that is closed to others, no other user can run browsers: they are root's then."""
    with pytest.MonkeyPatch.context() as patch:
        if os.geteuid() == 0 and not reachable():
            patch.setenv("OSTLER_BROWSERS_USER", "root")
            patch.setenv("OSTLER_BROWSERS_SANDBOX", "off")
        yield


def reachable() -> bool:
    """Whether nobody can get to the driver and to serve.js."""
    with contextlib.suppress(ConfigError):
        files = installed.driver()
        scripts = [Path(installed.__file__).with_name(name) for name in ("serve.js", "line.js")]
        Place(Path("/"), 65534, 65534).check(files.node, files.package, *scripts)
        return True
    return False


@contextlib.asynccontextmanager
async def serving(mode: str, slots: int = 3, **options: Any) -> AsyncIterator[Stand]:
    app = Ostler()
    browsers(app, "pool", mode=mode, slots=slots, **options)
    with scratch() as folder:
        stand = Stand(app.session_pools["pool"].target(), folder, slots)
        stand.endpoint = await stand.code.start(stand.worker)
        try:
            yield stand
        finally:
            await stand.code.stop()
            await until(lambda: not running(folder), f"the processes of {folder} to end")


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """As the node makes it: short, and passable for other users."""
    with tempfile.TemporaryDirectory(prefix="o-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        (folder / "private").mkdir(0o700)
        yield folder


def url(endpoint: Endpoint) -> str:
    """How a client reaches it without a relay."""
    if endpoint.address.startswith("tcp:"):
        return f"ws://127.0.0.1:{endpoint.address[4:]}{endpoint.path}"
    return f"ws+unix://{endpoint.address}:{endpoint.path}"


def running(folder: Path) -> list[int]:
    """The processes that work in a directory, or have it in their command line."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
            if str(folder).encode() in line or os.readlink(f"/proc/{pid}/cwd").startswith(str(folder)):
                found.append(int(pid))
    return found


async def until(found: Callable[[], Any], what: str, patience: float = PATIENCE) -> Any:
    deadline = time.monotonic() + patience
    while not (value := found()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {patience:g} s in vain for {what}")
        await asyncio.sleep(0.01)
    return value
