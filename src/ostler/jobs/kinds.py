"""Kinds, the types of a job's parameters and result as data: checks JSON values, and makes them of Python values. Pure; standard library alone.

A kind is an annotation as data (annotations.py), so that any process can check values without importing the app:

- "int", "float", "str", "bool", "null", "list", "dict", and "any" for whatever is not known here;
- "datetime", "date", "time" (ISO 8601), "timedelta" (seconds), "uuid", "path", "decimal" (text);
- ["list", item], ["dict", value] or ["dict", value, key], ["tuple", item, …], ["any of", kind, …], ["literal", value, …];
- ["object", name, {field: {"type": kind, "required": bool}}] for dataclasses and typed dicts;
- ["model", name, {…}], the same for models of pydantic: any object fits, since only their class knows what it takes.

A reader that does not know a kind takes any value for it.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
from datetime import date, datetime, time, timedelta
from pathlib import PurePath
from typing import Any

DEEPEST = 200  # levels of lists and objects in arguments, results and events: far from where any reader of JSON stops
SCALARS = (str, int, float, bool, type(None))
WANTED = {  # types that are text or a number in JSON
    "datetime": 'text such as "2026-01-31T12:00:00+00:00"',
    "date": 'text such as "2026-01-31"',
    "time": 'text such as "12:30:00"',
    "timedelta": "a number of seconds",
    "uuid": 'text such as "6f1c2d1e-0a55-4f4e-8a5b-3f1f0d9a7c11"',
    "decimal": 'a number, or text such as "12.50"',
    "path": "text",
}


def _read(kind: str, value: Any) -> Any:
    """Raises unless the value can be read as that type. Modules are loaded here if nobody has needed them before."""
    match kind:
        case "timedelta":
            return timedelta(seconds=value)
        case "uuid":
            from uuid import UUID  # noqa: PLC0415

            return UUID(value)
        case "decimal":
            from decimal import Decimal  # noqa: PLC0415

            return Decimal(str(value))
        case _:
            known: dict[str, Any] = {"datetime": datetime, "date": date, "time": time}
            return known[kind].fromisoformat(value)


def _leaf_fits(kind: str, value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number if kind == "timedelta" else isinstance(value, str) or (kind == "decimal" and is_number)):
        return False
    if kind == "path":
        return "\0" not in value
    try:
        _read(kind, value)
    except (ValueError, TypeError, ArithmeticError):
        return False
    return True


# ---- JSON values


def fits(kind: Any, value: Any) -> bool:
    """Whether a JSON value is of the kind."""
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
        case str() if kind in WANTED:
            return _leaf_fits(kind, value)
        case ["any of", *kinds]:
            return any(fits(k, value) for k in kinds)
        case ["literal", *values]:
            return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in values)
        case ["list", item]:
            return isinstance(value, list | tuple) and all(fits(item, v) for v in value)
        case ["tuple", *items]:
            return isinstance(value, list | tuple) and len(value) == len(items) and all(map(fits, items, value))
        case ["dict", item, *key]:
            return isinstance(value, dict) and all(_key_fits(key, k) and fits(item, v) for k, v in value.items())
        case ["model", _, fields]:  # without fields: what the class takes need not be an object
            return isinstance(value, dict) or not fields
        case ["object", *_]:
            return isinstance(value, dict) and _complaint("", kind, value) is None
        case _:
            return True


def _key_fits(kind: list[Any], key: Any) -> bool:
    if not isinstance(key, str):
        return False
    match kind:
        case []:
            return True
        case ["int"]:
            return key.removeprefix("-").isdecimal()
        case [["literal", *values]]:
            return key in map(str, values)
        case [other]:
            return fits(other, key)
    return False


def complaint(name: str, kind: Any, value: Any) -> str | None:
    """What is wrong with a value, as deep inside as can be told; None when it fits."""
    return None if fits(kind, value) else _complaint(name, kind, value) or _wrong(name, kind, value)


def _complaint(name: str, kind: Any, value: Any) -> str | None:
    match kind:
        case ["object", _, fields] if isinstance(value, dict):
            for field, known in fields.items():
                if field in value and (found := complaint(f"{name}.{field}", known["type"], value[field])):
                    return found
                if known["required"] and field not in value:
                    return f"'{name}.{field}' is missing"
            unknown = next((field for field in value if field not in fields), None)
            return None if unknown is None else f"'{name}' has no field {unknown!r}; it has {', '.join(fields)}"
        case ["list", item] if isinstance(value, list | tuple):
            wrong = next((n for n, v in enumerate(value) if not fits(item, v)), 0)
            return _complaint(f"{name}[{wrong}]", item, value[wrong]) if value else None
        case ["any of", *kinds] if len(objects := [k for k in kinds if k[0] == "object"]) == 1:
            return _complaint(name, objects[0], value)
    return None


def _wrong(name: str, kind: Any, value: Any) -> str:
    leaves = [f"{leaf}: {WANTED[leaf]}" for leaf in _leaves(kind)]
    told = leaves[0].partition(": ")[2] if len(leaves) == 1 else ", ".join(leaves)
    return f"{name!r} must be {words(kind)}{f' ({told})' if told else ''}, found {short(value)}"


def _leaves(kind: Any) -> list[str]:
    if isinstance(kind, str):
        return [kind] if kind in WANTED else []
    found = [] if kind[0] in ("literal", "object", "model") else [leaf for part in kind[1:] for leaf in _leaves(part)]
    return [*dict.fromkeys(found)]


def words(kind: Any) -> str:
    """A kind for people: 'list of str', 'int or null', 'Point(x: int, y: int = …)'."""
    match kind:
        case ["any of", *kinds]:
            return " or ".join(words(k) for k in kinds)
        case ["literal", *values]:
            return "one of " + ", ".join(json.dumps(v) for v in values)
        case ["list", item]:
            return f"list of {words(item)}"
        case ["tuple", *items]:
            return f"list of {len(items)} ({', '.join(words(item) for item in items)})"
        case ["dict", item, *_]:
            return f"dict of {words(item)}"
        case ["model", name, fields] if not fields:
            return str(name)
        case ["object" | "model", name, fields]:
            takes = (f"{f}: {words(k['type'])}{'' if k['required'] else ' = …'}" for f, k in fields.items())
            return f"{name}({', '.join(takes)})"
        case _:
            return str(kind)


def has_model(kind: Any) -> bool:
    """Whether a model of pydantic is a part of it."""
    match kind:
        case ["model", *_]:
            return True
        case ["object", _, fields]:
            return any(has_model(field["type"]) for field in fields.values())
        case ["any of" | "list" | "tuple" | "dict", *parts]:
            return any(map(has_model, parts))
    return False


def short(value: Any) -> str:
    """The value in an error message."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"


# ---- from Python values to JSON


def simple(value: Any) -> Any:
    """A value of a known type as JSON (its parts may be of known types, too): the `default` of a JSONEncoder. Raises TypeError."""
    match value:
        case enum.Enum():
            return value.value
        case datetime() | date() | time():
            return value.isoformat()
        case timedelta():
            return value.total_seconds()
        case PurePath():
            return str(value)
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        case _ if callable(dump := getattr(value, "model_dump", None)) and not isinstance(value, type):
            return dump(mode="json")
        case _ if any(isinstance(value, getattr(sys.modules.get(m), c, ())) for m, c in _TEXTS):
            return str(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


_TEXTS = (("uuid", "UUID"), ("decimal", "Decimal"))  # not imported here: nobody has one who has not


def plain(value: Any, levels: int = DEEPEST) -> Any:
    """The value with everything in it as JSON. What is of no known type, or nested deeper than that, stays as it is."""
    if type(value) in SCALARS or levels < 0:
        return value
    if isinstance(value, dict):
        return {k if type(k) is str else _key(k): plain(v, levels - 1) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v, levels - 1) for v in value]
    try:
        return plain(simple(value), levels - 1)
    except TypeError:
        return value


def _key(key: Any) -> Any:
    found = plain(key)
    return str(found) if type(found) in (str, int, float) else found
