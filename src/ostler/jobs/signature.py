"""Whether arguments fit a task, decided from its signature alone, in any process. Pure; standard library alone.

A signature travels as data (the `tasks` table), so the CLI and other processes check without importing the app.
Annotations that are JSON are checked in depth; any other annotation accepts anything that is JSON.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

from ostler.errors import BadArguments, ConfigError, PayloadTooLarge

DEEPEST = 200  # levels of lists and objects in arguments, results and events: far from where any reader of JSON stops
_MARKS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[^"\[\]{}]+')  # all of a JSON text but its brackets

# name, type, required, default where it is JSON; or {"name": "**"} for a task that takes anything
Parameters = list[dict[str, Any]]


def describe(function: Callable[..., Any]) -> Parameters:
    """The parameters behind the job handle; raises ConfigError on what a job cannot have."""
    name = getattr(function, "__name__", str(function))
    parameters = list(inspect.signature(function).parameters.values())
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or parameters[0].kind not in positional:
        raise ConfigError(f"job {name} must take the job handle as its first parameter: def {name}(job, …)")
    try:
        hints = typing.get_type_hints(function)
    except Exception:  # noqa: BLE001  a name that only exists for type checkers: then the annotations are not checked
        hints = {}
    _check_handle(name, parameters[0], hints.get(parameters[0].name))
    found: Parameters = []
    for parameter in parameters[1:]:
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
            raise ConfigError(
                f"job {name}: parameter {parameter.name!r} cannot be given by name; jobs take keyword arguments"
            )
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found.append({"name": "**"})
        else:
            required = parameter.default is inspect.Parameter.empty
            known = {"name": parameter.name, "type": _type(hints.get(parameter.name, Any)), "required": required}
            if not required and _is_json(parameter.default):
                known["default"] = parameter.default
            found.append(known)
    return found


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


_PLAIN: dict[Any, Any] = {
    int: "int",
    float: "float",
    str: "str",
    bool: "bool",
    type(None): "null",
    None: "null",
    list: "list",
    dict: "dict",
}


def _type(hint: Any) -> Any:
    """An annotation as data: a name, ["list", item], ["dict", value], ["any of", …], ["literal", …] or "any"."""
    if hint in _PLAIN if isinstance(hint, typing.Hashable) else False:
        return _PLAIN[hint]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return ["any of", *(_type(a) for a in args)]
    if origin is typing.Literal and all(isinstance(a, str | int | bool | None) for a in args):
        return ["literal", *args]
    if origin is list and args:
        return ["list", _type(args[0])]
    if origin is dict and len(args) == 2:
        return ["dict", _type(args[1])]
    return "any"


def fits(kind: Any, value: Any) -> bool:
    """Whether a JSON value is of the type."""
    match kind:
        case "any":
            return True
        case "int":
            return isinstance(value, int) and not isinstance(value, bool)
        case "float":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "str":
            return isinstance(value, str)
        case "bool":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "list":
            return isinstance(value, list | tuple)
        case "dict":
            return isinstance(value, dict)
        case ["any of", *kinds]:
            return any(fits(k, value) for k in kinds)
        case ["literal", *values]:
            return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)
        case ["list", item]:
            return isinstance(value, list | tuple) and all(fits(item, v) for v in value)
        case ["dict", item]:
            return isinstance(value, dict) and all(isinstance(k, str) and fits(item, v) for k, v in value.items())
        case _:
            return True


def words(kind: Any) -> str:
    """A type for people: 'list of str', 'int or null'."""
    match kind:
        case ["any of", *kinds]:
            return " or ".join(words(k) for k in kinds)
        case ["literal", *values]:
            return "one of " + ", ".join(json.dumps(v) for v in values)
        case ["list", item]:
            return f"list of {words(item)}"
        case ["dict", item]:
            return f"dict of {words(item)}"
        case _:
            return str(kind)


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
                complaints.append(f"{name!r} is not a parameter")
        elif name != "**" and not fits(known[name]["type"], value):
            complaints.append(f"{name!r} must be {words(known[name]['type'])}, found {_short(value)}")
    if complaints:
        takes = ", ".join(
            "**" if n == "**" else f"{n}: {words(p['type'])}{'' if p['required'] else ' = …'}" for n, p in known.items()
        )
        raise BadArguments(f"the arguments do not match task {task!r}: {'; '.join(complaints)}. It takes ({takes})")


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
        raise BadArguments(f"the arguments of task {task!r} cannot be written as JSON: {error}") from error
    if len(text) > limit:
        raise PayloadTooLarge(
            f"the arguments of task {task!r} are {len(text)} bytes as JSON, more than max_payload ({limit}); put the data into a file and pass its path"
        )
    return text


def _short(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
