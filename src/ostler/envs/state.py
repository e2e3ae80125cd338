"""What an environment is now: its description, its current build, and what is wrong with it. Reads only; standard library alone."""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import functools
import hashlib
import json
import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ostler.config import ENV_KEYS, EnvSettings, Settings
from ostler.errors import ConfigError, EnvError, EnvNotBuilt

STAMP = "ostler-env.json"
OLDEST = (3, 9)  # what can run in an environment at all
_INCLUDED = re.compile(r"^\s*(?:-r|-c|--requirement|--constraint)(?:\s+|=|(?=[^-\s]))(\S+)")
_SECRET = re.compile(r"//[^/@\s]+@")


class Declares(Protocol):
    """What is asked of an app: the environments that its code describes, and the name it was loaded by."""

    @property
    def envs(self) -> Mapping[str, EnvSettings]: ...

    @property
    def target(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Place:
    """Where an environment of Ostler's own is on disk."""

    link: Path
    folder: Path

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    @property
    def log(self) -> Path:
        return self.folder / "build.log"

    @property
    def failure(self) -> Path:
        return self.folder / "failed.json"

    def current(self) -> Path | None:
        """The directory of the current build, by its number; None when there is none that is complete."""
        try:
            found = self.link.parent / self.link.readlink()
        except PermissionError:
            raise
        except OSError:
            return None
        return found if (found / STAMP).is_file() else None


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment as it is now. `interpreter` is None where nothing can run in it; an old build may well be usable while the
    state is `building`, `outdated` or `failed`.
    """

    name: str
    state: str  # not built, building, ready, outdated, failed
    described: EnvSettings | None  # None: only its build is there, nothing describes it any more
    directory: Path
    command: str  # what makes it
    interpreter: Path | None = None
    python: str | None = None
    built_at: int | None = None
    installer: str | None = None
    reason: str | None = None
    log: Path | None = None  # of the last build
    tail: tuple[str, ...] = ()  # its last lines, where it failed


def place(settings: Settings, name: str) -> Place:
    """Where the environment is, built or not."""
    root = folder(settings)
    return Place(root / name, root / f"{name}.builds")


def folder(settings: Settings) -> Path:
    """The directory of all environments."""
    return Path(settings.env_dir).expanduser().absolute() if settings.env_dir else settings.data_dir / "envs"


def interpreter(settings: Settings, app: Declares, name: str, at_least: tuple[int, int] = OLDEST) -> Path:
    """The environment's interpreter, never another one. Raises EnvNotBuilt with the command that builds the environment, EnvError
    when its Python is too old, ConfigError when nothing describes it.
    """
    found = look(settings, app, name)
    if found.interpreter is None:
        why = f" ({found.reason})" if found.reason else ""
        raise EnvNotBuilt(f"environment {name!r} is {found.state}{why}; build it with: {found.command}")
    if found.python and tuple(map(int, found.python.split(".")[:2])) < at_least:
        wanted = ".".join(map(str, at_least))
        raise EnvError(
            f"environment {name!r} has Python {found.python}, and what runs in it needs {wanted} or later; "
            f'give it python = "{wanted}" and build it again: {found.command}'
        )
    return found.interpreter


def listing(settings: Settings, app: Declares) -> list[Environment]:
    """All environments: those that are described, and builds that nothing describes any more."""
    root = folder(settings)
    built: set[str] = set()
    with contextlib.suppress(PermissionError):  # which `look` tells of each that is described
        links = [p.name for p in root.iterdir() if p.is_symlink()] if root.is_dir() else []
        built = {name for name in links if place(settings, name).current()}
    return [look(settings, app, name) for name in sorted({*settings.envs, *app.envs, *built})]


def look(settings: Settings, app: Declares, name: str) -> Environment:
    """One environment as it is now. Raises ConfigError when it is neither described nor built."""
    described = settings.env(name, app.envs.get(name))
    if described is not None and described.path is not None:
        return _own(name, Path(described.path))
    where = place(settings, name)
    try:
        current = where.current() if "/" not in name else None
    except PermissionError as error:
        denied = f"permission denied: {error.filename}; build it as the user who runs it"
        return Environment(name, "failed", described, where.link, _command(settings, app, name), reason=denied)
    if described is None and current is None:
        raise ConfigError(_unknown(settings, app, name))
    stamp = read(current / STAMP) if current else {}
    python = current / "bin" / "python" if current else None
    usable = python if python is not None and os.access(python, os.X_OK) else None
    state, reason = _state(where, described, stamp, usable)
    return Environment(
        name=name,
        state=state,
        described=described,
        directory=current or where.link,
        command=_command(settings, app, name),
        interpreter=usable,
        python=stamp.get("python"),
        built_at=stamp.get("built_at"),
        installer=stamp.get("installer"),
        reason=reason,
        log=where.log if where.log.is_file() else None,
        tail=tuple(read(where.failure).get("tail", ())) if state == "failed" else (),
    )


def _state(
    where: Place, described: EnvSettings | None, stamp: Mapping[str, Any], usable: Path | None
) -> tuple[str, str | None]:
    if (pid := _builder(where)) is not None:
        return "building", f"by process {pid}"
    if failed := read(where.failure):
        return "failed", str(failed.get("reason", "the last build broke off"))
    if not stamp:
        return "not built", None
    if usable is None:
        return "failed", "its interpreter is gone: the Python that it was built with was removed or upgraded"
    if described is not None and stamp.get("hash") != digest(described):
        return "outdated", "its description or a requirements file changed after it was built"
    return "ready", None if described is not None else "nothing describes it any more"


def _own(name: str, path: Path) -> Environment:
    python = path / "bin" / "python"
    make = f"python3 -m venv {shlex.quote(str(path))}"
    described = EnvSettings(path=str(path))
    if not os.access(python, os.X_OK):
        return Environment(name, "not built", described, path, make, reason=f"there is no {python}")
    return Environment(name, "ready", described, path, make, interpreter=python, python=_version(path, python))


def _version(path: Path, python: Path) -> str | None:
    """The Python version of a virtual environment as it says of itself; of another kind (conda), as its interpreter says."""
    if (config := path / "pyvenv.cfg").is_file():
        for line in config.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition("=")
            if key.strip() in ("version", "version_info"):
                return ".".join(value.strip().split(".")[:3])
    return _known_version(str(python), python.stat().st_mtime_ns)


@functools.cache
def _known_version(python: str, _changed: int) -> str | None:
    """A node looks at each start of a worker: it asks once."""
    return asked_version(python)


def asked_version(python: str) -> str | None:
    """What an interpreter says of its version; None when it does not run."""
    code = "import sys; print('%d.%d.%d' % sys.version_info[:3])"
    try:
        done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _builder(where: Place) -> str | None:
    """The process that builds it now, or None. The lock is held by a living process, or not at all."""
    try:
        with where.lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().decode("ascii", "replace").strip() or "unknown"
    except OSError:
        pass
    return None


def digest(described: EnvSettings) -> str:
    """Changes with the description and with what the files that it names say; where they lie does not matter."""
    lines = described.requirements
    written = (
        _file(Path(lines), set()) if isinstance(lines, str) else _lines(lines or (), Path(described.folder), set())
    )
    fixed = _file(Path(described.constraints), set()) if described.constraints else None
    whole = [described.python, written, fixed, described.index, described.extra_index]
    if described.no_deps:
        whole.append(described.no_deps)
    return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:32]


def _lines(lines: tuple[str, ...] | list[str], base: Path, seen: set[Path]) -> list[Any]:
    """The lines, and what the files that they include say."""
    included = [_file(base / found[1], seen) for line in lines if (found := _INCLUDED.match(line))]
    return [list(lines), included]


def _file(path: Path, seen: set[Path]) -> Any:
    try:
        if path.resolve() in seen:
            return None
        seen.add(path.resolve())
        return _lines(path.read_text(encoding="utf-8", errors="replace").splitlines(), path.parent, seen)
    except OSError as error:
        return error.strerror  # to build it says so in words


def read(path: Path) -> dict[str, Any]:
    """A stamp or a failure; empty where there is none."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _command(settings: Settings, app: Declares, name: str) -> str:
    """What to type to build it, here."""
    parts = ["ostler", "env", "build", name]
    if name in app.envs:
        parts += ["--app", app.target or "APP"]
    if settings.file not in ("", "ostler.toml"):
        parts += ["--config", settings.file]
    if not settings.env_dir and settings.data_dir != Settings().data_dir:
        parts += ["--data", str(settings.data_dir)]
    return shlex.join(parts)


def _unknown(settings: Settings, app: Declares, name: str) -> str:
    known = sorted({*settings.envs, *app.envs})
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known) or 'none'}"
    return (
        f"environment {name!r} is not described; {hint} Describe it in ostler.toml ([env.{name}]) or with app.env({name!r}, …)"
        + ("" if app.target else "; if code describes it, name the app with --app")
    )


def hidden(text: str) -> str:
    """The text without user names and passwords of URLs."""
    return _SECRET.sub("//***@", text)


def shown(environment: Environment) -> dict[str, Any]:
    """The environment as JSON; passwords in URLs are left out."""
    told = environment.described
    texts = {key: getattr(told, key) for key in ENV_KEYS} if told else {}
    return {
        "name": environment.name,
        "state": environment.state,
        "reason": environment.reason,
        "usable": environment.interpreter is not None,
        "python": environment.python,
        "directory": str(environment.directory),
        "interpreter": str(environment.interpreter) if environment.interpreter else None,
        "built_at": environment.built_at,
        "installer": environment.installer,
        "log": str(environment.log) if environment.log else None,
        "tail": list(environment.tail),
        "command": environment.command,
        "described": _safe(texts) if told else None,
    }


def _safe(value: Any) -> Any:
    match value:
        case str():
            return hidden(value)
        case tuple() | list():
            return [_safe(v) for v in value]
        case dict():
            return {k: _safe(v) for k, v in value.items() if v is not None}
    return value
