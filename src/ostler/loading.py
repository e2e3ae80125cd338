"""Imports a user's file. Nothing can be enqueued while that happens. Standard library only.

A node, each of its workers and `ostler check` import the app's file. If importing it stored jobs, there would be more of them with every start.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

from ostler.errors import ConfigError

_App = TypeVar("_App")

_OURS, _PYTHON = str(Path(__file__).parent), str(Path(importlib.__file__).parent.parent)


class _Load:
    def __init__(self, what: str) -> None:
        self.what = what
        self.over = False  # what was begun meanwhile, such as a task of an event loop, may still carry it


# Not per thread: `asyncio.to_thread`, as in `enqueue_async`, belongs to the load. A thread that the file starts does not.
_loads: ContextVar[_Load | None] = ContextVar("loads", default=None)


def refuse(does: str = "enqueues a job") -> None:
    """Raise ConfigError when an app is being loaded here."""
    load = _loads.get()
    if load is not None and not load.over:
        raise ConfigError(
            f"{load.what} {does} while it is being imported{line()}. The node, every worker and `ostler check` import it, and each would do "
            'it again: put the call under if __name__ == "__main__": or into another script'
        )


def line() -> str:
    """Where the user's code is that is being run: " (app.py, line 12)"."""
    frame: Any = sys._getframe(1)  # noqa: SLF001
    while frame is not None and _not_theirs(frame.f_code.co_filename):
        frame = frame.f_back
    return f" ({Path(frame.f_code.co_filename).name}, line {frame.f_lineno})" if frame is not None else ""


def _not_theirs(file: str) -> bool:
    return file.startswith((_OURS, "<frozen")) or (file.startswith(_PYTHON) and "site-packages" not in file)


def find(target: str, kind: type[_App]) -> _App:
    """The one object of that kind that `path/to/file.py`, `package.module` or either with `:name` names; raises ConfigError."""
    where, _, attribute = target.partition(":") if not target.endswith(".py") else (target, "", "")
    module = import_file(Path(where)) if where.endswith(".py") else import_module(where)
    if attribute:
        found = getattr(module, attribute, None)
        if not isinstance(found, kind):
            raise ConfigError(f"{where} has no Ostler app named {attribute!r}")
        return found
    found = getattr(module, "app", None)
    if isinstance(found, kind):
        return found
    apps = {name: value for name, value in vars(module).items() if isinstance(value, kind)}
    if len({id(a) for a in apps.values()}) != 1:
        what = (
            f"several apps ({', '.join(apps)}); choose one, for example {target}:{next(iter(apps))}"
            if apps
            else "no app; add app = Ostler()"
        )
        raise ConfigError(f"{target} has {what}")
    return next(iter(apps.values()))


def import_file(path: Path) -> Any:
    """The module of a file; raises ConfigError."""
    if not path.is_file():
        raise ConfigError(f"there is no file {path}")
    path = path.resolve()
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        name = f"ostler_app_{name}"  # a file called json.py must not hide a module
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    return _executed(lambda: spec.loader.exec_module(module) or module, str(path))  # type: ignore[union-attr]


def import_module(name: str) -> Any:
    """The module of that name; raises ConfigError."""
    sys.path.insert(0, "")
    try:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"there is no module {name!r}; name a file (path/to/file.py) or a module (package.module:app)"
            )
    except (ModuleNotFoundError, ValueError) as error:
        raise ConfigError(
            f"there is no module {name!r} ({error}); name a file (path/to/file.py) or a module (package.module:app)"
        ) from error
    return _executed(lambda: importlib.import_module(name), name)


def _executed(work: Callable[[], Any], what: str) -> Any:
    mark = _Load(what)
    token = _loads.set(mark)
    try:
        return work()
    except ConfigError:
        raise
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        import traceback  # noqa: PLC0415

        trace = "".join(traceback.format_exception(type(error), error, error.__traceback__)).strip()
        raise ConfigError(f"{what} cannot be loaded: {type(error).__name__}: {error}\n{trace}") from error
    finally:
        mark.over = True
        _loads.reset(token)
