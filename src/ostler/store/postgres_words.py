"""What travels to and from a PostgreSQL server: statements in one message, values that it can take, rows.

A transaction says several things whose answers nobody waits for: they travel with the next one, as one message of the simple
protocol, each as EXECUTE of what was prepared before. The driver's pipelines would do, but for their last words: a server that
heard them in a transaction waits for its client for ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import psycopg
from psycopg.types.numeric import Int8Dumper

from ostler.store import queries

Said = tuple[str, Mapping[str, Any] | None]  # a statement and its values

_UNSTORABLE = re.compile(r"\x00|[\ud800-\udfff]")
_VALUE = re.compile(r"%\((\w+)\)s|%%")
_COMMENT = re.compile(r"--[^\n]*")
_NAMED = re.compile(r"('(?:[^']|'')*')|(?<![:\w]):([a-z_]\w*)")
_PLANS = 200  # statements that a connection has prepared at most


class Speaker:
    """Says statements on one connection. `plans`: those that come again are prepared, which a pooler does not allow."""

    def __init__(self, connection: psycopg.Connection[Any], *, plans: bool) -> None:
        self._connection = connection
        self._writer = psycopg.ClientCursor(connection)
        self._most = _PLANS if plans else 0
        # A statement and the types of its values -> EXECUTE …; '' when it came once
        self._plans: dict[tuple[str, ...], str] = {}
        self._prepared = 0

    def say(self, *said: Said) -> psycopg.Cursor[Any]:
        """All of it, in one trip to the server; the answer to the last one. Errors are the driver's."""
        if len(said) == 1:
            sql, values = said[0]
            return self._connection.execute(sql, None if values is None else _fit_all(values))
        message = "; ".join(sql if values is None else self._spoken(sql, _fit_all(values)) for sql, values in said)
        cursor = self._connection.execute(message, prepare=False)
        while cursor.nextset():
            pass
        return cursor

    def roll_back(self) -> None:
        """End the transaction. The driver has the server forget everything that was prepared, for what the transaction may have changed."""
        self._plans.clear()
        self._connection.execute("ROLLBACK")

    def _spoken(self, sql: str, values: Mapping[str, Any]) -> str:
        types = [_type(value) for value in values.values()]
        plan = self._plans.get(key := (sql, *types))
        if plan is None and len(self._plans) < self._most:
            self._plans[key] = ""
        elif plan == "":
            plan = self._plans[key] = self._prepare(sql, dict(zip(values, types, strict=True)))
        return self._writer.mogrify(plan or sql, values)

    def _prepare(self, sql: str, types: Mapping[str, str]) -> str:
        self._prepared += 1
        name, places = f"ostler_{self._prepared}", {value: n for n, value in enumerate(types, 1)}
        text = _VALUE.sub(lambda m: f"${places[m[1]]}" if m[1] else "%", sql)
        self._connection.execute(f"PREPARE {name}{_listed(types.values())} AS {text}", prepare=False)
        return f"EXECUTE {name}{_listed(f'%({value})s' for value in types)}"


class Whole(Int8Dumper):
    """One type for all whole numbers, so one plan. Written into a statement, a sign belongs to its number: `-1::int` would not."""

    def quote(self, obj: Any) -> Any:
        return b"(%d)" % obj if obj < 0 else super().quote(obj)


def _listed(words: Iterable[str]) -> str:
    text = ", ".join(words)
    return f" ({text})" if text else ""


def _type(value: Any) -> str:
    """As the driver sends it: `unknown` has the server find the type."""
    return "bigint" if value.__class__ is int else "float8" if value.__class__ is float else "unknown"


def _fit_all(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fit(value) for name, value in values.items()}


def fit(value: Any) -> Any:
    """A value as the server can take it. Texts hold neither NUL nor half of a surrogate pair there."""
    if isinstance(value, str):
        if "\\u" in value and ("\\u0000" in value or "\\ud" in value):
            return _fit_json(value)
        if "\x00" in value or not value.isascii():
            return _UNSTORABLE.sub("\ufffd", value)
    return value


def _fit_json(text: str) -> str:
    """A batch whose texts hold such a character. JSON inside of them is escaped once more, so it stays as it is."""
    try:
        return json.dumps(_clean(json.loads(text)))
    except ValueError:
        return _UNSTORABLE.sub("\ufffd", text)


def _clean(value: Any) -> Any:
    match value:
        case str():
            return _UNSTORABLE.sub("\ufffd", value)
        case list():
            return [_clean(v) for v in value]
        case dict():
            return {k: _clean(v) for k, v in value.items()}
    return value


def rows(cursor: Any) -> Callable[[Sequence[Any]], Any]:
    """A row factory of the driver: tuples whose values are found by name, too."""
    return _row_of(tuple(column.name for column in cursor.description or ()))


@cache
def _row_of(names: tuple[str, ...]) -> Callable[[Sequence[Any]], Any]:
    places = {name: place for place, name in enumerate(names)}

    class Row(tuple[Any, ...]):
        __slots__ = ()

        def __getitem__(self, key: Any) -> Any:
            return tuple.__getitem__(self, places[key] if key.__class__ is str else key)

        def keys(self) -> tuple[str, ...]:
            return names

    return Row


@cache
def statements(schema: str) -> dict[str, str]:
    """The statements as the driver takes them: `%(name)s` for `:name`."""
    if found := queries.unequal():
        raise ValueError(f"the dialects differ: {'; '.join(found)}")
    return {name: translated(renamed(sql, schema)) for name, sql in queries.load("postgres").items()}


def translated(sql: str) -> str:
    """A statement as the driver takes it."""
    bare = _COMMENT.sub("", sql).replace("%", "%%")
    return _NAMED.sub(lambda m: m[1] or f"%({m[2]})s", bare).strip()


def renamed(sql: str, schema: str) -> str:
    """With another schema in place of `ostler`."""
    return sql if schema == "ostler" else re.sub(r"\bostler\.", f"{schema}.", re.sub(r"\bostler_", f"{schema}_", sql))
