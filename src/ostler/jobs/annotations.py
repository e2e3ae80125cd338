"""From an annotation to a type: its kind, and how a JSON value of that kind becomes the annotated one. Pure; standard library alone."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any, NamedTuple

from ostler.jobs.kinds import SCALARS, WANTED, fits, plain

Load = Callable[[Any], Any]


class Type(NamedTuple):
    """`load` makes the annotated type of a JSON value of this kind; None: it is that value."""

    kind: Any
    load: Load | None = None


_ANY = Type("any")
_PLAIN: dict[Any, str] = {int: "int", float: "float", str: "str", bool: "bool", type(None): "null", None: "null"}
_PLAIN |= {list: "list", dict: "dict"}
_LEAF_OF = {("datetime", name): name for name in ("datetime", "date", "time", "timedelta")}
_LEAF_OF |= {("uuid", "UUID"): "uuid", ("decimal", "Decimal"): "decimal"}


def type_of(hint: Any, within: dict[type, Type] | None = None) -> Type:
    """The type of an annotation. `within`: the classes that it is a part of, for those that contain themselves."""
    within = {} if within is None else within
    if isinstance(hint, typing.Hashable) and hint in _PLAIN:
        return Type(_PLAIN[hint])
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return type_of(args[0], within)
    if origin in (typing.Union, types.UnionType):
        return _union([type_of(a, within) for a in args])
    if origin is typing.Literal and all(isinstance(a, str | int | bool | None) for a in args):
        return Type(["literal", *(plain(a) for a in args)])
    if origin is list and args:
        return _many(type_of(args[0], within), list)
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return _many(type_of(args[0], within), tuple)
    if origin is tuple and args and args != ((),):
        return _tuple([type_of(a, within) for a in args], tuple)
    if origin is dict and len(args) == 2:
        return _dict(type_of(args[0]), type_of(args[1], within))
    if (known := hint if origin is None else origin) and isinstance(known, type):
        return _class(known, within)
    base = getattr(hint, "__supertype__", None)  # of a NewType
    return _ANY if base is None else type_of(base, within)


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
        case Type(str() as kind, load) if kind in WANTED:
            return load
        case Type(["literal", *values], load) if load:
            known = {str(value): load(value) for value in values}
            return lambda text: known[text]
    return None


def _class(hint: type, within: dict[type, Type]) -> Type:
    if (name := _LEAF_OF.get((hint.__module__, hint.__qualname__))) is not None:
        return Type(name, _reader(name, hint))
    if issubclass(hint, PurePath):
        return Type("path", hint)
    if issubclass(hint, enum.Flag):
        return Type("int", hint)
    if issubclass(hint, enum.Enum):
        values = [member.value for member in hint]
        return Type(["literal", *values], hint) if values and all(type(v) in SCALARS for v in values) else _ANY
    is_model = callable(getattr(hint, "model_validate", None))  # of pydantic
    is_tuple = issubclass(hint, tuple) and hasattr(hint, "_fields")
    if not (is_model or is_tuple or dataclasses.is_dataclass(hint) or typing.is_typeddict(hint)):
        return _ANY
    if (known := within.get(hint)) is not None:
        return known
    # Where it contains itself, its parts are read in depth, but only checked as far as there.
    within[hint] = Type("list" if is_tuple else "dict", lambda value: found.load(value) if found.load else value)
    made = _model(hint, within) if is_model else _named(hint, within) if is_tuple else None
    within[hint] = found = made or _object(hint, within)
    return found


def _reader(leaf: str, hint: Any) -> Load:
    match leaf:
        case "timedelta":
            return lambda value: hint(seconds=value)
        case "decimal":
            return lambda value: hint(str(value))
    return getattr(hint, "fromisoformat", hint)  # type: ignore[no-any-return]


def _model(hint: Any, within: dict[type, Type]) -> Type:
    if getattr(hint, "__pydantic_root_model__", False):
        return Type(["model", hint.__name__, {}], hint.model_validate)
    fields = {
        field.alias or name: {"type": type_of(field.annotation, within).kind, "required": field.is_required()}
        for name, field in hint.model_fields.items()
    }
    return Type(["model", hint.__name__, fields], hint.model_validate)


def _named(hint: Any, within: dict[type, Type]) -> Type:
    hints = _hints(hint)
    return _tuple([type_of(hints.get(name, Any), within) for name in hint._fields], lambda values: hint(*values))


def _object(hint: Any, within: dict[type, Type]) -> Type:
    hints = _hints(hint)
    fields = {name: (type_of(hints.get(name, Any), within), needed) for name, needed in _fields(hint).items()}
    reads = {name: found.load for name, (found, _) in fields.items() if found.load}
    kind = {name: {"type": found.kind, "required": needed} for name, (found, needed) in fields.items()}

    def load(values: dict[str, Any]) -> Any:
        return hint(**{name: reads[name](v) if name in reads else v for name, v in values.items()})

    is_json = typing.is_typeddict(hint) and not reads
    return Type(["object", hint.__name__, kind], None if is_json else load)


def _fields(hint: Any) -> dict[str, bool]:
    """The fields of a dataclass or typed dict, and whether each must be given."""
    if dataclasses.is_dataclass(hint):
        none = dataclasses.MISSING
        return {f.name: f.default is none and f.default_factory is none for f in dataclasses.fields(hint) if f.init}
    marks = {name: typing.get_origin(found) for name, found in _hints(hint, include_extras=True).items()}
    # `__required_keys__` misses those that are strings.
    needed: dict[Any, bool] = {typing.Required: True, typing.NotRequired: False}
    return {name: needed.get(marks.get(name), name in hint.__required_keys__) for name in hint.__annotations__}


def _hints(hint: Any, *, include_extras: bool = False) -> dict[str, Any]:
    try:
        return typing.get_type_hints(hint, include_extras=include_extras)
    except Exception:  # noqa: BLE001  a name that only exists for type checkers: then its fields are not checked
        return {}


def _same(value: Any) -> Any:
    return value
