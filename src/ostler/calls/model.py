"""Declared models as plain data, checked when they are declared. Standard library only, Python 3.9."""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Union

from ostler.errors import BadArguments, ConfigError, NotFound

NEVER = -1.0  # an idle time that never ends
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_DURATION = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")
_UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PLACE = re.compile(r"\{([a-z_]+)\}")
_PLACES = ("port", "socket", "model", "n")
_LONGEST_ID = 200
_RESERVED = ("plane",)  # pools of the node's own

Duration = Union[float, str]


class Options(TypedDict, total=False):
    """The options of `app.model`, for all model ids or for one of them."""

    env: str | None
    gpu_mb: float
    memory_mb: float
    idle: Duration
    pinned: bool
    preload: bool
    batch: int
    batch_wait: float
    concurrency: int
    workers: int
    queue: int
    startup: Duration
    timeout: Duration
    kill_on_cancel: bool
    park: bool | None
    files: Sequence[str]


@dataclass(frozen=True)
class ModelOptions:
    """How one model id is run. Times are in seconds."""

    env: str | None = None  # the name of an environment; None: the node's own interpreter
    gpu_mb: float = 0  # memory to reserve until the real use has been measured
    memory_mb: float = 0
    idle: float = 60.0  # how long it stays loaded after its last call; 0: not at all, -1: for ever
    pinned: bool = False  # loaded when the node starts, and never unloaded
    preload: bool = False  # loaded when the node starts
    batch: int = 1  # the most calls in one infer_batch
    batch_wait: float = 0.0  # under load, how long to wait for a fuller batch
    concurrency: int = 1  # calls at once in one worker
    workers: int = 1  # workers of this model id
    queue: int = 100  # calls that may wait; more are refused
    startup: float = 120.0  # how long it may take to become ready, counted from its last progress
    timeout: float = 300.0  # of one call
    kill_on_cancel: bool = False  # kill the worker if a cancelled call does not end
    park: bool | None = (
        None  # while idle, move its GPU memory to the host; None: if that is cheaper than loading it again
    )
    files: tuple[str, ...] = ()  # paths that must exist, or it is unavailable; {model} is the model id

    @property
    def connections(self) -> int:
        """How many calls one worker can take at once: with batches twice the size, so that the next one fills while one runs."""
        return self.concurrency if self.batch == 1 else 2 * self.batch


_FIELDS = {f.name: f for f in dataclasses.fields(ModelOptions)}
_WHOLE = {"batch": (1, 1024), "concurrency": (1, 256), "workers": (1, 64), "queue": (0, 100_000)}
_NUMBERS = {"gpu_mb": (0, 1e9), "memory_mb": (0, 1e9), "batch_wait": (0, 10)}


@dataclass(frozen=True)
class ModelSpec:
    """A declared model or HTTP server, with its model ids. `target` is the class; a server has `argv` instead."""

    name: str
    target: Any
    models: Mapping[str, ModelOptions]
    common: ModelOptions = field(default_factory=ModelOptions)
    any_model: bool = False
    max_models: int = 8
    argv: tuple[str, ...] = ()
    ready: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    path: str = "/"  # of a server: the path that calls are posted to by default

    @property
    def is_server(self) -> bool:
        return self.target is None

    @property
    def streams(self) -> bool:
        """Whether its calls always stream."""
        function = getattr(self.target, "infer", None)
        return inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)

    @property
    def speaks(self) -> list[str]:
        """Its methods that answer OpenAI's routes."""
        from ostler.calls.openai import spoken  # noqa: PLC0415  only a node asks

        return spoken(self.target)

    @property
    def parks(self) -> bool:
        """Whether the class has `park` and `wake`."""
        return hasattr(self.target, "park")

    def options(self, model_id: str) -> ModelOptions:
        """How this id is run. Raises NotFound if it is not served, BadArguments if it is not a valid id."""
        found = self.models.get(model_id)
        if found is not None:
            return found
        if not self.any_model:
            known = ", ".join(sorted(self.models))
            raise NotFound(f"{self.name} has no model {str(model_id)[:80]!r}; known: {known}")
        if not isinstance(model_id, str) or not 0 < len(model_id) <= _LONGEST_ID or not model_id.isprintable():
            raise BadArguments(
                f"{self.name}: a model id has 1 to {_LONGEST_ID} printable characters, found {str(model_id)[:80]!r}"
            )
        if leads_out(model_id):
            raise BadArguments(f"{self.name}: the model id {model_id[:80]!r} is a path that leaves its directory")
        return self.common

    def missing(self, model_id: str) -> str | None:
        """The first of its files that does not exist."""
        named = (path.replace("{model}", model_id) for path in self.options(model_id).files)
        return next((path for path in named if not os.path.exists(path)), None)  # noqa: PTH110


def leads_out(model_id: str) -> bool:
    """Whether an id that is not listed could be a path outside the directory of models, or an option of a program."""
    return model_id.startswith(("/", "\\", "~", "-")) or ".." in re.split(r"[/\\]", model_id)


def seconds(value: Any, what: str) -> float:
    """Parse a duration: a number of seconds, or text such as "90", "5m", "1.5h". Negative values mean for ever (-1). Raises ConfigError."""
    number = math.nan
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    elif isinstance(value, str) and (found := _DURATION.fullmatch(value.strip())):
        number = float(found.group(1)) * _UNITS[found.group(2) or ""]
    if math.isnan(number) or number > 1e9:
        raise ConfigError(f'{what} must be a number of seconds or text such as "5m", found {value!r}')
    return number if number >= 0 else NEVER


def check_name(name: Any) -> str:
    """Check that it can be the name of a pool. Raises ConfigError."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} cannot be the name of a model; use letters, digits, '_', '.' and '-', at most 63")
    if name in _RESERVED:
        raise ConfigError(f"{name!r} is reserved for the node; choose another name for the model")
    return name


def declare(
    name: str,
    target: Any,
    options: Mapping[str, Any],
    models: Iterable[str] | Mapping[str, Mapping[str, Any]] | None = None,
    *,
    any_model: bool = False,
    max_models: int = 8,
) -> ModelSpec:
    """Declare a model that is a class. Raises ConfigError."""
    what = f"model {check_name(name)!r}"
    common = merged(what, ModelOptions(), options)
    ids = _ids(what, name, models, common, any_model=any_model)
    _check_count(what, max_models)
    for one in (common, *ids.values()):
        _check_class(what, target, one)
    return ModelSpec(name, target, ids, common, bool(any_model), max_models)


def declare_server(
    name: str,
    argv: Sequence[str],
    ready: str | None,
    options: Mapping[str, Any],
    models: Iterable[str] | Mapping[str, Mapping[str, Any]] | None = None,
    *,
    any_model: bool = False,
    max_models: int = 8,
    variables: Mapping[str, str] | None = None,
    cwd: str | None = None,
    path: str = "/",
) -> ModelSpec:
    """Declare a model that an HTTP server program serves. Raises ConfigError."""
    what = f"server {check_name(name)!r}"
    if isinstance(argv, str) or not argv or not all(isinstance(part, str) for part in argv):
        raise ConfigError(f"{what}: argv must be a list of strings, found {argv!r}")
    common = merged(what, ModelOptions(), options)
    ids = _ids(what, name, models, common, any_model=any_model)
    _check_count(what, max_models)
    for one in (common, *ids.values()):
        if one.batch > 1:
            raise ConfigError(f"{what}: batch needs a class with infer_batch; a server does its own batching")
    texts = [*argv, *(variables or {}).values(), ready or ""]
    places = {place for text in texts for place in _PLACE.findall(text)}
    if wrong := places - set(_PLACES):
        known = ", ".join(f"{{{place}}}" for place in _PLACES)
        raise ConfigError(f"{what}: {{{min(wrong)}}} is not a placeholder; use {known}")
    if not {"port", "socket"} & {place for text in texts[:-1] for place in _PLACE.findall(text)}:
        raise ConfigError(
            f"{what}: put {{port}} or {{socket}} into argv or variables, so that it knows where to listen"
        )
    _check_ready(what, ready)
    if not isinstance(path, str) or not re.fullmatch(r"/[!-~]*", path):
        raise ConfigError(f"{what}: path must be a path such as /v1/embeddings, found {path!r}")
    return ModelSpec(
        name, None, ids, common, bool(any_model), max_models, tuple(argv), ready, dict(variables or {}), cwd, path
    )


def merged(what: str, common: ModelOptions, options: Mapping[str, Any]) -> ModelOptions:
    """The common options, overridden by these. Raises ConfigError."""
    if unknown := sorted(str(name) for name in options.keys() - _FIELDS.keys()):
        raise ConfigError(f"{what} has no option {unknown[0]!r}; known: {', '.join(_FIELDS)}")
    found = dataclasses.replace(common, **{name: _checked(what, name, value) for name, value in options.items()})
    if found.batch > 1 and found.concurrency > 1:
        raise ConfigError(
            f"{what}: batch={found.batch} and concurrency={found.concurrency} cannot be combined; "
            "use workers= to run several batches at once"
        )
    return found


def _checked(what: str, name: str, value: Any) -> Any:
    place = f"{what}: {name}"
    if name in ("pinned", "preload", "kill_on_cancel", "park"):
        if not isinstance(value, bool) and not (name == "park" and value is None):
            raise ConfigError(f"{place} must be True or False, found {value!r}")
        return value
    if name == "files":
        if (
            isinstance(value, str)
            or not isinstance(value, Sequence)
            or not all(isinstance(path, str) for path in value)
        ):
            raise ConfigError(f"{place} must be a list of paths, found {value!r}")
        return tuple(value)
    if name == "env":
        if value is not None and (not isinstance(value, str) or not _NAME.fullmatch(value)):
            raise ConfigError(f"{place} must be the name of an environment or None, found {value!r}")
        return value
    if name in ("idle", "startup", "timeout"):
        time = seconds(value, place)
        if name != "idle" and time <= 0:
            raise ConfigError(f"{place} must be more than 0 seconds, found {value!r}")
        return time
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if name in _WHOLE:
        low, high = _WHOLE[name]
        if not isinstance(value, int) or not number or not low <= value <= high:
            raise ConfigError(f"{place} must be a whole number from {low} to {high}, found {value!r}")
        return value
    least, most = _NUMBERS[name]
    if not number or not least <= value <= most:
        raise ConfigError(f"{place} must be a number from {least} to {most:g}, found {value!r}")
    return value


def _ids(what: str, name: str, models: Any, common: ModelOptions, *, any_model: bool) -> dict[str, ModelOptions]:
    if models is None:
        return {} if any_model else {name: common}
    if isinstance(models, str) or not isinstance(models, (Mapping, Iterable)):
        raise ConfigError(f"{what}: models must be a list of ids, or a dict of options by id, found {models!r}")
    given: dict[Any, Any] = dict(models) if isinstance(models, Mapping) else {one: {} for one in models}
    if not given and not any_model:
        raise ConfigError(f"{what}: models is empty; list at least one id, leave it out, or set any_model=True")
    found = {}
    for one, options in given.items():
        if not isinstance(one, str) or not 0 < len(one) <= _LONGEST_ID or not one.isprintable():
            raise ConfigError(f"{what}: a model id has 1 to {_LONGEST_ID} printable characters, found {one!r}")
        if not isinstance(options, Mapping):
            raise ConfigError(f"{what}: the options of {one!r} must be a dict, found {options!r}")
        found[one] = merged(f"{what}, {one!r}", common, options)
    return found


def _check_count(what: str, max_models: Any) -> None:
    if not isinstance(max_models, int) or isinstance(max_models, bool) or not 1 <= max_models <= 10_000:
        raise ConfigError(f"{what}: max_models must be a whole number from 1 to 10000, found {max_models!r}")


def _check_class(what: str, target: Any, options: ModelOptions) -> None:
    if not inspect.isclass(target):
        raise ConfigError(f"{what} must be a class with load(model_id) and infer(payload), found {target!r}")
    for method in ("load", "infer"):
        if not callable(getattr(target, method, None)) and not (method == "infer" and hasattr(target, "infer_batch")):
            raise ConfigError(
                f"{what}: class {target.__name__} has no method {method}; it needs load(self, model_id) and infer(self, payload)"
            )
    for method in ("load", "infer", "infer_batch"):
        if hasattr(target, method):
            _check_method(what, target, method)
    if hasattr(target, "park") != hasattr(target, "wake"):
        raise ConfigError(f"{what}: class {target.__name__} needs both park and wake, or neither")
    if options.batch > 1 and not hasattr(target, "infer_batch"):
        raise ConfigError(f"{what}: batch={options.batch} needs a method infer_batch(self, payloads)")
    function = getattr(target, "infer" if options.batch == 1 and hasattr(target, "infer") else "infer_batch")
    for method in ("embed", "chat", "transcribe"):
        if _is_async(getattr(target, method, None)) and not _is_async(function):
            raise ConfigError(
                f"{what}: {target.__name__}.{method} is async, so {function.__name__} must be async as well"
            )


def _is_async(function: Any) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)


def _check_method(what: str, target: Any, method: str) -> None:
    try:
        signature = inspect.signature(getattr(target, method))
        signature.bind(None, None)
    except ValueError:  # written in C: it has no signature to check
        return
    except TypeError:
        wanted = {"load": "model_id", "infer": "payload", "infer_batch": "payloads"}[method]
        raise ConfigError(
            f"{what}: {target.__name__}.{method}{signature} must take one argument: def {method}(self, {wanted})"
        ) from None


def _check_ready(what: str, ready: Any) -> None:
    if ready is None:
        return
    fits = isinstance(ready, str) and re.fullmatch(r"http:/(?!/).*|https?://.+|tcp:|tcp://.+|line:.+", ready, re.DOTALL)
    if not fits:
        raise ConfigError(
            f"{what}: ready={ready!r} is not a probe: use http:/path or tcp: (on its own port or socket), "
            "http://host:port/path, tcp://host:port, line:REGEX or None"
        )
    if ready.startswith("line:"):
        try:
            re.compile(ready[5:])
        except re.error as error:
            raise ConfigError(f"{what}: ready={ready!r} is not a regular expression ({error})") from None
