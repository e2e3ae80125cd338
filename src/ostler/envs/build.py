"""Building and removing environments: with uv where it is found, else with venv and pip."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from ostler import private
from ostler.config import EnvSettings, Settings
from ostler.envs import install
from ostler.envs.state import STAMP, Declares, Environment, Place, asked_version, digest, hidden, look, place, read
from ostler.errors import Conflict, EnvError

Tell = Callable[[str], None]
_TAIL = 20  # lines of the log that a failure keeps
_LOCK_PATIENCE = 1.0  # seconds: whoever looks at the state holds the lock for a moment


def build(
    settings: Settings,
    app: Declares,
    name: str,
    *,
    force: bool = False,
    installer: str | None = None,
    tell: Tell = lambda _: None,
) -> Environment:
    """Build the environment unless it is ready; `tell` gets each line of progress. Raises EnvError with the last lines of the log
    when it fails; the build that was there before stays as it was.
    """
    described = _buildable(look(settings, app, name))
    where = place(settings, name)
    try:
        with _locked(settings, where, name) as lock:
            fresh = not where.failure.exists() and _is_current(where, described)
            if fresh and look(settings, app, name).interpreter and not force:
                tell(f"environment {name!r} is ready; --force builds it again")
            else:
                _Build(where, name, described, install.find(installer or described.installer), lock, tell).run()
    except OSError as error:
        raise EnvError(f"environment {name!r} cannot be built: {error}") from error
    return look(settings, app, name)


def remove(settings: Settings, app: Declares, name: str, *, force: bool = False) -> None:
    """Delete all builds. Raises Conflict while a process runs in one, unless forced."""
    _buildable(look(settings, app, name), anyway=True)
    where = place(settings, name)
    try:
        with _locked(settings, where, name):
            users = sorted({pid for build in _builds(where) for pid in users_of(build)})
            if users and not force:
                raise Conflict(
                    f"environment {name!r} is in use by process {', '.join(map(str, users))}; stop it, or remove it with --force"
                )
            where.link.unlink(missing_ok=True)
            shutil.rmtree(where.folder)
    except OSError as error:
        raise EnvError(f"environment {name!r} cannot be removed: {error}") from error


def _buildable(found: Environment, *, anyway: bool = False) -> EnvSettings:
    described = found.described
    if described is not None and described.path is not None:
        raise EnvError(
            f"environment {found.name!r} is your own ({described.path}): Ostler only uses it; make it with: {found.command}"
        )
    if described is None and not anyway:
        raise EnvError(
            f"nothing describes environment {found.name!r} any more; 'ostler env remove {found.name}' deletes it"
        )
    return described or EnvSettings()


def _is_current(where: Place, described: EnvSettings) -> bool:
    current = where.current()
    return current is not None and read(current / STAMP).get("hash") == digest(described)


@contextlib.contextmanager
def _locked(settings: Settings, where: Place, name: str) -> Iterator[int]:
    """Hold the environment's lock; the descriptor, which the installer gets too: a build whose builder was killed is over only
    when its installer is.
    """
    deadline = time.monotonic() + _LOCK_PATIENCE
    while True:
        _make(settings, where.folder)
        with private.open(where.lock, "a+", encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                file.seek(0)
                who = file.read().strip() or "unknown"
                raise Conflict(
                    f"environment {name!r} is being built by process {who}; wait until that has ended"
                ) from None
            if not _is_same(file, where.lock):  # it was removed meanwhile
                continue
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield file.fileno()
            return


def _make(settings: Settings, folder: Path) -> None:
    if folder.is_relative_to(settings.data_dir):
        private.make(folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)


def _is_same(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


class _Build:
    """One build, from the lock to the new link."""

    def __init__(
        self, where: Place, name: str, described: EnvSettings, installer: install.Installer, lock: int, tell: Tell
    ) -> None:
        self._where, self._name, self._described, self._installer = where, name, described, installer
        self._lock, self._tell = lock, tell
        self._tail: deque[str] = deque(maxlen=_TAIL)

    def run(self) -> None:
        where = self._where
        if where.link.exists() and not where.link.is_symlink():
            raise EnvError(f"{where.link} is in the way: it is not an environment of Ostler's; move or delete it")
        _clean(where)
        target = where.folder / str(1 + max((int(p.name) for p in _builds(where)), default=0))
        written = digest(self._described)  # before: what changes from now on makes it outdated
        began = time.monotonic()
        _write(where.failure, {"reason": "the last build broke off", "at": _now()})
        try:
            commands = self._installer.commands(self._described, target)
            self._tell(f"building environment {self._name!r} with {self._installer.name} in {target}")
            with private.open(where.log, "w", encoding="utf-8") as log:
                for command in commands:
                    self._step(command, log)
            python = asked_version(str(target / "bin" / "python"))
            if python is None:
                raise EnvError(f"environment {self._name!r} cannot be built: {target / 'bin' / 'python'} does not run")
            _write(
                target / STAMP,
                {"hash": written, "python": python, "built_at": _now(), "installer": self._installer.name},
            )
        except BaseException as error:
            shutil.rmtree(target, ignore_errors=True)
            if isinstance(error, EnvError | OSError):
                reason = str(error).partition("\n")[0].removeprefix(f"environment {self._name!r} cannot be built: ")
                _write(where.failure, {"reason": reason, "tail": list(self._tail), "at": _now()})
            raise
        self._publish(target)
        self._tell(f"environment {self._name!r} is ready: Python {python}, built in {time.monotonic() - began:.1f} s")

    def _publish(self, target: Path) -> None:
        """The new build is the current one, from one moment to the next. Those before it go when nobody uses them."""
        where = self._where
        os.sync()  # after a power cut the link must not lead to files that are not there
        fresh = where.folder / "link"
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(Path(where.folder.name) / target.name)
        fresh.replace(where.link)
        where.failure.unlink(missing_ok=True)
        _clean(where)

    def _step(self, command: list[str], log: IO[str]) -> None:
        words = hidden(shlex.join(command))
        self._heard(f"$ {words}", log)
        code = _run(command, self._cwd(), self._lock, lambda line: self._heard(line, log))
        if code != 0:
            tail = "\n".join(f"  {line}" for line in self._tail)
            raise EnvError(f"environment {self._name!r} cannot be built: exit code {code} of {words}\n{tail}")

    def _heard(self, line: str, log: IO[str]) -> None:
        line = hidden(line.rstrip())
        if line:
            log.write(line + "\n")
            log.flush()
            self._tail.append(line)
            self._tell(line)

    def _cwd(self) -> str:
        """Relative paths count from there."""
        lines = self._described.requirements
        return str(Path(lines).parent) if isinstance(lines, str) else self._described.folder or "."


def _run(command: Sequence[str], cwd: str, lock: int, heard: Tell) -> int:
    """Run it in a process group of its own, which ends with this function; its exit code."""
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=_environ(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
        pass_fds=(lock,),
    )
    with process:
        try:
            assert process.stdout is not None
            for line in process.stdout:
                heard(line)
            return process.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise


def _environ() -> dict[str, str]:
    """As it is here, settings of pip and uv too, without what would mix this environment with the new one, and without secrets of
    the node: packages run code of their own when they are built.
    """
    mixing = (
        "PYTHONPATH",
        "PYTHONHOME",
        "VIRTUAL_ENV",
        "PIP_TARGET",
        "PIP_PREFIX",
        "PIP_USER",
        "UV_TARGET",
        "UV_PREFIX",
    )
    kept = {k: v for k, v in os.environ.items() if k not in mixing and not k.startswith("OSTLER_")}
    return kept | {"PYTHONNOUSERSITE": "1", "PYTHONUNBUFFERED": "1"}


def _builds(where: Place) -> list[Path]:
    return [p for p in where.folder.iterdir() if p.name.isdigit() and p.is_dir()] if where.folder.is_dir() else []


def _clean(where: Place) -> None:
    """Delete what builds that died left, and old builds that no process uses any more."""
    current = where.current()
    for build in _builds(where):
        if build != current and not users_of(build):
            shutil.rmtree(build, ignore_errors=True)


def users_of(directory: Path) -> list[int]:
    """The living processes of this machine that run in an environment, as far as this user may see them."""
    prefixes = {os.fsencode(p) for p in (directory, directory.resolve())}
    programs, marks = tuple(p + b"/" for p in prefixes), {b"VIRTUAL_ENV=" + p for p in prefixes}
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            runs = (entry / "cmdline").read_bytes().startswith(programs)
            if runs or not marks.isdisjoint((entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return found


def _write(path: Path, value: dict[str, Any]) -> None:
    """Whole or not at all."""
    fresh = path.with_name(path.name + ".new")
    with private.open(fresh, "w", encoding="utf-8") as file:
        json.dump(value, file)
    fresh.replace(path)


def _now() -> int:
    return int(time.time() * 1000)
