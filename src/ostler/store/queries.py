"""Loads the named statements of a dialect. The files carry the same names in each dialect, so the verbs are written once."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


@cache
def load(dialect: str) -> dict[str, str]:
    """All statements of a dialect by name; a name given twice is a mistake and raises."""
    statements: dict[str, str] = {}
    for path in sorted((files("ostler.store") / "sql" / dialect).iterdir(), key=lambda p: p.name):
        if not path.name.endswith(".sql"):
            continue
        parts = _NAME.split(path.read_text(encoding="utf-8"))[1:]
        for name, text in zip(parts[::2], parts[1::2], strict=True):
            if name in statements:
                msg = f"statement {name!r} is defined twice in the {dialect} files"
                raise ValueError(msg)
            statements[name] = text.strip().rstrip(";")
    return statements


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
