"""Routes of an app's own (`@app.web`): made and checked. `ostler check` and the node's start ask the same questions."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import dataclasses
import inspect
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from fastapi import APIRouter
from fastapi.dependencies.models import Dependant

from ostler.config import Settings
from ostler.errors import ConfigError, OstlerError
from ostler.web.context import Context
from ostler.web.extend import NodeApi

Factory = Callable[[NodeApi], APIRouter]


def routers(factories: Sequence[Factory], node: NodeApi) -> list[APIRouter]:
    """What the app's functions return. Raises ConfigError where a node could not serve it."""
    return [_made(factory, node) for factory in factories]


def check(factories: Sequence[Factory], settings: Settings) -> None:
    """Raise ConfigError like the start of a node would. The data directory that the functions see is empty, and deleted afterwards.

    A function that uses more of the node than its settings, or misses a file, is not judged.
    """

    async def make(folder: str) -> None:  # as in the node, in an event loop
        known = dataclasses.replace(settings, data=folder)
        for factory in factories:
            with contextlib.suppress(_NoNodeError, OSError):
                _made(factory, NodeApi(cast("Context", _NoNode(known))))

    with tempfile.TemporaryDirectory(prefix="ostler-check-") as folder:
        asyncio.run(make(folder))


class _NoNodeError(OstlerError):
    pass


class _NoNode:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def __getattr__(self, name: str) -> Any:
        raise _NoNodeError(name)


def _made(factory: Factory, node: NodeApi) -> APIRouter:
    try:
        router = factory(node)
    except (OstlerError, OSError):
        raise
    except Exception as error:
        trace = "".join(traceback.format_exception(error)).strip()
        raise ConfigError(
            f"the @app.web function {_named(factory)} failed: {type(error).__name__}: {error}\n{trace}"
        ) from error
    if not isinstance(router, APIRouter):
        raise ConfigError(
            f"the @app.web function {_named(factory)} must return a FastAPI APIRouter, not {type(router).__name__}"
        )
    for route in router.routes:
        if (dependant := getattr(route, "dependant", None)) is not None:
            _check(str(getattr(route, "path", route)), dependant)
    return router


def _check(path: str, dependant: Dependant) -> None:
    """Refuse annotations that FastAPI cannot look up: it would take them for query parameters that every request lacks."""
    for function in _functions(dependant):
        for name, annotation in _texts(function):
            if missing := _unknown(annotation, function):
                raise ConfigError(
                    f"route {path}: {_named(function)} has the annotation {name}: {annotation}, but {missing} is not defined at the top of "
                    f"its file. `from __future__ import annotations` makes annotations text, which FastAPI looks up there, not inside the "
                    f"@app.web function: import {missing} at the top of the file, or remove the __future__ import"
                )


def _functions(dependant: Dependant) -> Iterator[Callable[..., Any]]:
    if dependant.call is not None:
        yield dependant.call
    for inner in dependant.dependencies:
        yield from _functions(inner)


def _texts(function: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return
    for name, annotation in [
        *((p.name, p.annotation) for p in found.parameters.values()),
        ("return", found.return_annotation),
    ]:
        if isinstance(annotation, str):
            yield name, annotation


def _unknown(annotation: str, function: Callable[..., Any]) -> str | None:
    """The name in an annotation that nothing at the top of the function's file has."""
    known = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        eval(annotation, {**vars(builtins), **known})  # noqa: S307  as FastAPI does
    except NameError as error:
        return error.name
    except Exception:  # noqa: BLE001  FastAPI has said what it thinks of it
        return None
    return None


def _named(function: Callable[..., Any]) -> str:
    """Such as `upload (web.py, line 12)`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    where = f" ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code else ""
    return f"{getattr(function, '__name__', function)}{where}"
