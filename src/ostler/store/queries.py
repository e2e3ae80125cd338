"""Loads the named statements of a dialect, and holds the two dialects to the same statements with the same parameters.

    -- name: job                 a statement
    -- condition: of_queue       what may stand for the {where} of a statement
    -- own: count_new            a statement that the other dialect has no use for

Values are `:name`. A statement that is run for many rows has `?` on SQLite, which executes it once for each, and `:rows` on
PostgreSQL, which gets all of them in one JSON array: `row ->> 0` there is the first `?` here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files

_NAME = re.compile(r"^-- (name|condition|own): (\w+)\s*$", re.MULTILINE)
_COMMENT = re.compile(r"--[^\n]*")
_TEXT = re.compile(r"'(?:[^']|'')*'")
_VALUE = re.compile(r"(?<![:\w]):([a-z_]\w*)")
_ROW = re.compile(r"\brow ->>? (\d+)")


@cache
def load(dialect: str) -> Mapping[str, str]:
    """All statements and conditions of a dialect by name; a name given twice is a mistake and raises."""
    found: dict[str, str] = {}
    for path in sorted((files("ostler.store") / "sql" / dialect).iterdir(), key=lambda p: p.name):
        if path.name.endswith(".sql"):
            for name, text in parse(path.read_text(encoding="utf-8")).items():
                if name in found:
                    raise ValueError(f"statement {name!r} is defined twice in the {dialect} files")
                found[name] = text
    return found


@cache
def own(dialect: str) -> frozenset[str]:
    """The statements that only this dialect has."""
    paths = (files("ostler.store") / "sql" / dialect).iterdir()
    texts = (path.read_text(encoding="utf-8") for path in paths if path.name.endswith(".sql"))
    return frozenset(name for text in texts for kind, name in _NAME.findall(text) if kind == "own")


def parse(text: str) -> dict[str, str]:
    """The statements of one file."""
    parts = _NAME.split(text)[1:]
    return {name: body.strip().rstrip(";") for name, body in zip(parts[1::3], parts[2::3], strict=True)}


def parameters(sql: str) -> tuple[frozenset[str], int]:
    """(the named values, how many values each row has where it is run for many)."""
    bare = _TEXT.sub("''", _COMMENT.sub("", sql))
    names = set(_VALUE.findall(bare))
    numbered = [int(n) for n in re.findall(r"\?(\d+)", bare)] or [bare.count("?")]
    columns = max(numbered)
    if "rows" in names:
        names.remove("rows")
        columns = 1 + max(int(n) for n in _ROW.findall(bare))
    return frozenset(names), columns


def differences(one: Mapping[str, str], other: Mapping[str, str], apart: frozenset[str] = frozenset()) -> list[str]:
    """What one dialect has and the other has not, in words. `apart`: statements that need not be in both."""
    found = [f"{name} is only in one of them" for name in sorted((one.keys() ^ other.keys()) - apart)]
    pairs = {name: (parameters(one[name]), parameters(other[name])) for name in sorted(one.keys() & other.keys())}
    return found + [
        f"{name} has {here} here and {there} there" for name, (here, there) in pairs.items() if here != there
    ]


def where(statement: str, conditions: Sequence[str], texts: Mapping[str, str]) -> str:
    """The statement with these conditions in the place of its {where}."""
    return texts[statement].replace("{where}", " AND ".join(texts[name] for name in conditions) or "true")


@cache
def migrations(dialect: str) -> list[tuple[int, str, str]]:
    """The forward migrations of a dialect as (number, name, SQL), in order."""
    folder = files("ostler.store") / "sql" / dialect / "migrations"
    found = [
        (int(p.name[:4]), p.name.removesuffix(".sql"), p.read_text(encoding="utf-8"))
        for p in folder.iterdir()
        if p.name.endswith(".sql")
    ]
    return sorted(found)


def newest(dialect: str) -> int:
    """The number of the newest migration that this code knows."""
    return migrations(dialect)[-1][0]


def unequal() -> list[str]:
    """What the two dialects do not have in common and should."""
    return differences(load("sqlite"), load("postgres"), own("sqlite") | own("postgres"))
