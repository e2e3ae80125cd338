"""The types of a job's parameters and result: annotations as data, and Python values as JSON and back. Pure; standard library alone.

A kind is an annotation as data, so that any process can check values without importing the app:

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
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from datetime import date, datetime, time, timedelta
from pathlib import PurePath
from typing import Any, NamedTuple

DEEPEST = 200  # levels of lists and objects in arguments, results and events: far from where any reader of JSON stops
Load = Callable[[Any], Any]


class Type(NamedTuple):
    """`load` makes the annotated type of a JSON value of this kind; None: it is that value."""

    kind: Any
    load: Load | None = None


# ---- from annotations

_ANY = Type("any")
_PLAIN: dict[Any, str] = {int: "int", float: "float", str: "str", bool: "bool", type(None): "null", None: "null"}
_PLAIN |= {list: "list", dict: "dict"}
_SCALARS = (str, int, float, bool, type(None))


def describe(hint: Any, within: dict[type, Type] | None = None) -> Type:
    """The type of an annotation. `within`: the classes that it is a part of, for those that contain themselves."""
    within = {} if within is None else within
    if isinstance(hint, typing.Hashable) and hint in _PLAIN:
        return Type(_PLAIN[hint])
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return describe(args[0], within)
    if origin in (typing.Union, types.UnionType):
        return _union([describe(a, within) for a in args])
    if origin is typing.Literal and all(isinstance(a, str | int | bool | None) for a in args):
        return Type(["literal", *(plain(a) for a in args)])
    if origin is list and args:
        return _many(describe(args[0], within), list)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _many(describe(args[0], within), tuple)
    if origin is tuple and args and args != ((),):
        return _tuple([describe(a, within) for a in args], tuple)
    if origin is dict and len(args) == 2:
        return _dict(describe(args[0]), describe(args[1], within))
    if (known := hint if origin is None else origin) and isinstance(known, type):
        return _class(known, within)
    base = getattr(hint, "__supertype__", None)  # of a NewType
    return _ANY if base is None else describe(base, within)


def _union(members: list[Type]) -> Type:
    def load(value: Any) -> Any:
        found = next((member for member in members if fits(member.kind, value)), _ANY)
        return found.load(value) if found.load else value

    return Type(["any of", *(m.kind for m in members)], load if any(m.load for m in members) else None)


def _many(item: Type, into: Callable[[Iterator[Any]], Any]) -> Type:
    kind, read = ["list", item.kind], item.load
    if read is None:
        return Type(kind, into if into is tuple else None)
    return Type(kind, lambda values: into(read(v) for v in values))


def _tuple(items: list[Type], make: Callable[[Iterator[Any]], Any]) -> Type:
    reads = [item.load or _same for item in items]
    return Type(
        ["tuple", *(item.kind for item in items)],
        lambda values: make(read(v) for read, v in zip(reads, values, strict=True)),
    )


def _dict(key: Type, value: Type) -> Type:
    """Keys are texts in JSON; other keys are read from them."""
    read = value.load or _same
    if (read_key := _key_reader(key)) is not None:
        return Type(["dict", value.kind, key.kind], lambda values: {read_key(k): read(v) for k, v in values.items()})
    return Type(["dict", value.kind], value.load and (lambda values: {k: read(v) for k, v in values.items()}))


def _key_reader(key: Type) -> Load | None:
    match key:
        case Type("int", load):
            return lambda text: load(int(text)) if load else int(text)
        case Type(str() as kind, load) if kind in _WANTED:
            return load
        case Type(["literal", *values], load) if load:
            known = {str(value): load(value) for value in values}
            return lambda text: known[text]
    return None


def _class(hint: type, within: dict[type, Type]) -> Type:
    if (name := _LEAF_OF.get((hint.__module__, hint.__qualname__))) is not None:
        return Type(
            name, _of_seconds if name == "timedelta" else _of_number(hint) if name == "decimal" else _reader(hint)
        )
    if issubclass(hint, PurePath):
        return Type("path", hint)
    if issubclass(hint, enum.Flag):
        return Type("int", hint)
    if issubclass(hint, enum.Enum):
        values = [member.value for member in hint]
        return Type(["literal", *values], hint) if values and all(type(v) in _SCALARS for v in values) else _ANY
    is_model = callable(getattr(hint, "model_validate", None))  # of pydantic
    is_tuple = issubclass(hint, tuple) and hasattr(hint, "_fields")
    if not (is_model or is_tuple or dataclasses.is_dataclass(hint) or typing.is_typeddict(hint)):
        return _ANY
    if (known := within.get(hint)) is not None:
        return known
    # Where it contains itself, its parts are read in depth, but only checked as far as there.
    within[hint] = Type("list" if is_tuple else "dict", lambda value: found.load(value) if found.load else value)
    made = _model(hint, within) if is_model else _named(hint, _fields(hint), within) if is_tuple else None
    within[hint] = found = made or _object(hint, within)
    return found


def _model(hint: Any, within: dict[type, Type]) -> Type:
    if getattr(hint, "__pydantic_root_model__", False):
        return Type(["model", hint.__name__, {}], hint.model_validate)
    fields = {
        field.alias or name: {"type": describe(field.annotation, within).kind, "required": field.is_required()}
        for name, field in hint.model_fields.items()
    }
    return Type(["model", hint.__name__, fields], hint.model_validate)


def _named(hint: Any, fields: Mapping[str, bool], within: dict[type, Type]) -> Type:
    hints = _hints(hint)
    return _tuple([describe(hints.get(name, Any), within) for name in fields], lambda values: hint(*values))


def _object(hint: Any, within: dict[type, Type]) -> Type:
    hints = _hints(hint)
    fields = {name: (describe(hints.get(name, Any), within), needed) for name, needed in _fields(hint).items()}
    reads = {name: found.load for name, (found, _) in fields.items() if found.load}
    kind = {name: {"type": found.kind, "required": needed} for name, (found, needed) in fields.items()}

    def load(values: dict[str, Any]) -> Any:
        return hint(**{name: reads[name](v) if name in reads else v for name, v in values.items()})

    is_json = typing.is_typeddict(hint) and not reads
    return Type(["object", hint.__name__, kind], None if is_json else load)


def _fields(hint: Any) -> dict[str, bool]:
    """The fields of a class, and whether each must be given."""
    if dataclasses.is_dataclass(hint):
        none = dataclasses.MISSING
        return {f.name: f.default is none and f.default_factory is none for f in dataclasses.fields(hint) if f.init}
    if typing.is_typeddict(hint):
        marks = {name: typing.get_origin(found) for name, found in _hints(hint, include_extras=True).items()}
        needed: dict[Any, bool] = {
            typing.Required: True,
            typing.NotRequired: False,
        }  # `__required_keys__` misses those that are strings
        return {name: needed.get(marks.get(name), name in hint.__required_keys__) for name in hint.__annotations__}
    return dict.fromkeys(hint._fields, True)


def _hints(hint: Any, *, include_extras: bool = False) -> dict[str, Any]:
    try:
        return typing.get_type_hints(hint, include_extras=include_extras)
    except Exception:  # noqa: BLE001  a name that only exists for type checkers: then its fields are not checked
        return {}


def _same(value: Any) -> Any:
    return value


# ---- types that are text or a number in JSON

_LEAF_OF = {("datetime", name): name for name in ("datetime", "date", "time", "timedelta")}
_LEAF_OF |= {("uuid", "UUID"): "uuid", ("decimal", "Decimal"): "decimal"}
_WANTED = {
    "datetime": 'text such as "2026-01-31T12:00:00+00:00"',
    "date": 'text such as "2026-01-31"',
    "time": 'text such as "12:30:00"',
    "timedelta": "a number of seconds",
    "uuid": 'text such as "6f1c2d1e-0a55-4f4e-8a5b-3f1f0d9a7c11"',
    "decimal": 'a number, or text such as "12.50"',
    "path": "text",
}


def _reader(hint: Any) -> Load:
    return getattr(hint, "fromisoformat", hint)  # type: ignore[no-any-return]


def _of_seconds(value: float) -> timedelta:
    return timedelta(seconds=value)


def _of_number(hint: Any) -> Load:
    return lambda value: hint(str(value))


def _read(kind: str, value: Any) -> Any:
    """Raises unless the value can be read as that type. Modules are loaded here if nobody has needed them before."""
    match kind:
        case "timedelta":
            return _of_seconds(value)
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
        case str() if kind in _WANTED:
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
    leaves = [f"{leaf}: {_WANTED[leaf]}" for leaf in _leaves(kind)]
    told = leaves[0].partition(": ")[2] if len(leaves) == 1 else ", ".join(leaves)
    return f"{name!r} must be {words(kind)}{f' ({told})' if told else ''}, found {short(value)}"


def _leaves(kind: Any) -> list[str]:
    if isinstance(kind, str):
        return [kind] if kind in _WANTED else []
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
    if type(value) in _SCALARS or levels < 0:
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
