"""Options that commands share. `where` hands a command the settings that follow from them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ostler import config


def place(function: Callable[..., Any]) -> Callable[..., Any]:
    """--data, --store, --config as they were given, for commands that load an app's settings with them."""
    for option in (
        click.option("--data", metavar="DIR", help="The data directory (default: ./.ostler)."),
        click.option("--store", metavar="URL", help="The store, if it is not in the data directory."),
        click.option(
            "--config",
            "file",
            metavar="FILE",
            type=click.Path(path_type=Path),
            help="Settings file (default: ./ostler.toml).",
        ),
    ):
        function = option(function)
    return function


def as_json(function: Callable[..., Any]) -> Callable[..., Any]:
    """--json: for programs."""
    return click.option("--json", "json_", is_flag=True, help="Print JSON.")(function)


def where(function: Callable[..., Any]) -> Callable[..., Any]:
    """--data, --store, --config: the command's first parameter is the settings that follow."""

    @functools.wraps(function)
    def run(*args: Any, data: str | None, store: str | None, file: Path | None, **options: Any) -> Any:
        return function(config.load({"data": data, "store": store}, file=file), *args, **options)

    return place(run)
