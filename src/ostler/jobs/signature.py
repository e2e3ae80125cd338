"""Whether arguments fit a task, decided from its signature alone, in any process. Pure; standard library alone.

A signature travels as data (the `tasks` table), so the CLI and other processes check without importing the app.
Annotations that `kinds` knows are checked in depth; any other annotation accepts anything that is JSON.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ostler import habits
from ostler.errors import BadArguments, ConfigError, PayloadTooLarge
from ostler.jobs import kinds
from ostler.jobs.annotations import Load, Type, type_of
from ostler.jobs.kinds import DEEPEST
from ostler.jobs.options import OPTIONS

_MARKS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[^"\[\]{}]+')  # all of a JSON text but its brackets

# name, type, required, default where it is JSON; or {"name": "**"} for a task that takes anything
Parameters = list[dict[str, Any]]


class Signature(NamedTuple):
    """`loads` makes the annotated type of each argument that has another form in JSON; most jobs have none."""

    parameters: Parameters
    loads: dict[str, Load]
    returns: Type

    @property
    def models(self) -> dict[str, Load]:
        """`loads` of the arguments with a model of pydantic in them."""
        return {p["name"]: self.loads[p["name"]] for p in self.parameters if kinds.has_model(p.get("type"))}


class Row(dict[str, Any]):
    """A declared task as it is stored. Where the app is loaded, `models` checks arguments further than their kinds can."""

    models: Mapping[str, Load] = {}


def describe(function: Callable[..., Any]) -> Signature:
    """The parameters behind the job handle, and the result; raises ConfigError on what a job cannot have."""
    name = getattr(function, "__name__", str(function))
    parameters = list(inspect.signature(function).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in positional:
        raise ConfigError(f"job {name} must take the job handle as its first parameter: def {name}(job, …)")
    hints = _hints(function)
    _check_handle(name, parameters[0], hints.get(parameters[0].name))
    found, loads = [], {}
    for parameter in parameters[1:]:
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
            raise ConfigError(
                f"job {name}: parameter {parameter.name!r} cannot be given by name; jobs take keyword arguments"
            )
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found.append({"name": "**"})
        else:
            required = parameter.default is inspect.Parameter.empty
            kind, load = type_of(hints.get(parameter.name, Any))
            known = {"name": parameter.name, "type": kind, "required": required}
            default = parameter.default
            if load is not None:
                loads[parameter.name] = load
                default = kinds.plain(default)
            if not required and _is_json(default):
                known["default"] = default
            found.append(known)
    return Signature(found, loads, type_of(hints.get("return", Any)))


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """The annotations that can be resolved. One that has a name which only exists for type checkers is left out."""
    try:
        return typing.get_type_hints(function)
    except Exception:  # noqa: BLE001
        found: dict[str, Any] = {}
        for name, given in getattr(function, "__annotations__", {}).items():
            one = types.SimpleNamespace(__annotations__={name: given})
            with contextlib.suppress(Exception):
                found |= typing.get_type_hints(one, getattr(function, "__globals__", {}))
        return found


def doubts(function: Callable[..., Any]) -> list[str]:
    """Annotations of parameters that look as if they were checked, and are not."""
    hints, found = _hints(function), []
    for parameter in [*inspect.signature(function).parameters.values()][1:]:
        name, given = parameter.name, parameter.annotation
        if given is not inspect.Parameter.empty and name not in hints:
            found.append(f"the annotation {given!r} of {name!r} cannot be resolved, so its values are not checked")
        elif _has_set(hints.get(name)):
            found.append(f"{name!r} is annotated with a set, which JSON does not have: use a list")
    return found


def _has_set(hint: Any) -> bool:
    return (
        hint in (set, frozenset)
        or typing.get_origin(hint) in (set, frozenset)
        or any(map(_has_set, typing.get_args(hint)))
    )


# What people call the handle when they do not annotate it; any other name is taken for a parameter of the job.
_HANDLES = {"job", "j", "ctx", "context", "task", "self", "handle", "this", "me", "run"}


def _check_handle(job: str, first: inspect.Parameter, hint: Any) -> None:
    """Raise ConfigError when the first parameter is not the job handle, by its annotation or else by its name."""
    if hint is None and first.annotation is inspect.Parameter.empty:
        fits = first.name.startswith("_") or first.name.lower() in _HANDLES or first.name.lower().endswith("job")
        shown = first.name
    else:  # without a hint the annotation is a name that only exists for type checkers
        fits = hint is None or hint is Any or getattr(hint, "__name__", "") == "Job"
        shown = f"{first.name}: {getattr(hint, '__name__', hint)}"
    if not fits:
        raise ConfigError(
            f"job {job}: its first parameter is the job handle, found {shown!r}; write def {job}(job, {shown}, …)"
        )


def whole(parameters: Parameters, args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as the function will see them, defaults among them: what is spelled out and what is left out is the same job."""
    return {**{p["name"]: p["default"] for p in parameters if "default" in p}, **args}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def check(task: str, parameters: Parameters, args: Mapping[str, Any]) -> None:
    """Raise BadArguments, with every complaint in one sentence, unless the arguments fit."""
    if not parameters and not args:
        return
    known = {p["name"]: p for p in parameters}
    complaints = [
        f"{name!r} is missing" for name, p in known.items() if name != "**" and p["required"] and name not in args
    ]
    for name, value in args.items():
        if name not in known:
            if "**" not in known:
                complaints.append(f"{name!r} is not a parameter{_as_option(task, name)}")
        elif name != "**" and not kinds.fits(known[name]["type"], value):
            complaints.append(str(kinds.complaint(name, known[name]["type"], value)))
    if complaints:
        raise BadArguments(
            f"the arguments do not match task {task!r}: {'; '.join(complaints)}. It takes ({words(parameters)})"
        )


def words(parameters: Parameters) -> str:
    """The parameters for people, with their defaults."""
    return ", ".join(
        "**" if p["name"] == "**" else f"{p['name']}: {kinds.words(p['type'])}{_default(p)}" for p in parameters
    )


def _default(parameter: Mapping[str, Any]) -> str:
    if parameter["required"]:
        return ""
    text = json.dumps(parameter["default"], ensure_ascii=False) if "default" in parameter else "…"
    return f" = {text if len(text) <= 40 else '…'}"


def _as_option(task: str, name: str) -> str:
    if name in OPTIONS:
        return f"; as an option, write {task}.options({name}=…).enqueue(…)"
    known = habits.OPTIONS.get(name, "").partition("=")[0]
    return f"; write {task}.options({known}=…).enqueue(…)" if known in OPTIONS else habits.option(name)


def loaded(task: str, loads: Mapping[str, Load], values: dict[str, Any]) -> dict[str, Any]:
    """Arguments that fit, as the annotated types. Raises BadArguments if a class does not take its values."""
    found = dict(values)
    for name in loads.keys() & values.keys():
        try:
            found[name] = loads[name](values[name])
        except Exception as error:
            raise BadArguments(f"the arguments do not match task {task!r}: {_refusal(name, error)}") from error
    return found


def _refusal(name: str, error: Exception) -> str:
    """What a class says of its values; pydantic's complaints with the names of the fields."""
    if not callable(each := getattr(error, "errors", None)):
        return f"{name!r} is refused by its type: {type(error).__name__}: {error}"
    told = [(".".join([name, *map(str, one["loc"])]), one["msg"], one["input"]) for one in each()]
    return "; ".join(f"{where!r}: {message}, found {kinds.short(value)}" for where, message, value in told)


def check_depth(text: str) -> None:
    """Raise ValueError on JSON that is nested so deep that a reader, here or elsewhere, might give up on it."""
    if text.count("[") + text.count("{") <= DEEPEST:
        return
    depth = 0
    for mark in _MARKS.sub("", text):
        depth += 1 if mark in "[{" else -1
        if depth > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")


_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)  # made once: `json.dumps` makes one for each call


def encode(task: str, args: Mapping[str, Any], limit: int) -> str:
    """The arguments as JSON text; raises BadArguments or PayloadTooLarge."""
    try:
        text = _JSON.encode(args)
        check_depth(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadArguments(
            f"the arguments of task {task!r} cannot be written as JSON: {error}{_not_json(args)}"
        ) from error
    if len(text) > limit:
        raise PayloadTooLarge(
            f"the arguments of task {task!r} are {len(text)} bytes as JSON, more than max_payload ({limit}); put the data into a file and pass its path"
        )
    return text


def _not_json(args: Mapping[str, Any]) -> str:
    """Which argument it is, and what helps."""
    for name, value in args.items():
        if not _is_json(value):
            known = _is_json(kinds.plain(value))
            return f" ({name!r}{'; annotate the parameter with its type, and it is converted' if known else ''})"
    return ""
