"""A model from the terminal: `ostler call`. Ctrl-C closes the connection, and that cancels the call."""

from __future__ import annotations

import contextlib
import json
import mimetypes
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from ostler.calls.body import Body
from ostler.calls.calling import CallOptions
from ostler.calls.client import Caller
from ostler.cli.enqueue import pairs
from ostler.cli.options import as_json, where
from ostler.config import Settings
from ostler.errors import BadArguments, CallError, CallRefused, PayloadTooLarge

_Write = Callable[[bytes], object]


@click.command()
@click.argument("task")
@click.argument("args", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("--model", metavar="ID", help="Which model of TASK; not needed if it has only one.")
@click.option("--payload", metavar="JSON", help="The payload, or '-' to read it from standard input.")
@click.option("--file", "file_", metavar="PATH", help="Send this file unchanged, or '-' for standard input.")
@click.option("--type", "kind", metavar="TYPE", help="The file's content type (default: guessed from its name).")
@click.option("--out", metavar="PATH", type=click.Path(path_type=Path), help="Write the result to this file.")
@click.option("--timeout", metavar="TIME", help="How long to wait in total: seconds, or 5m.")
@click.option(
    "--keep-alive",
    metavar="TIME",
    help="How long the model stays loaded after this call: 0 unloads it at once, -1 keeps it.",
)
@click.option("--priority", type=int, default=0, help="Waiting calls with a higher priority go first.")
@where
@as_json
def call(
    known: Settings,
    task: str,
    args: tuple[str, ...],
    model: str | None,
    payload: str | None,
    file_: str | None,
    kind: str | None,
    out: Path | None,
    timeout: str | None,
    keep_alive: str | None,
    priority: int,
    json_: bool,
) -> None:
    """Call a model of TASK with the arguments as a JSON object; with --file they are form fields.

    A VALUE that is valid JSON is parsed, anything else is text. The result is printed as JSON, text is printed unchanged, and a stream is printed as it
    arrives. --json prints the whole response, including the request id and the duration.
    """
    options: CallOptions = {"timeout": timeout, "keep_alive": keep_alive, "priority": priority}
    sent = _file(known, file_, kind, args, payload) if file_ is not None else _payload(known, args, payload)
    caller = Caller(lambda: known)
    try:
        question = caller.ask(task, model, sent, options)
        with _output(out) as write:
            if json_:
                answer = caller.answer_sync(question)
                write(json.dumps({**vars(answer), "result": _described(answer.result)}, indent=2).encode() + b"\n")
            else:
                with contextlib.closing(caller.stream_sync(question)) as items:
                    _show(items, write, to_terminal=out is None and sys.stdout.isatty())
    except CallError as error:
        said = "" if error.request_id is None else f" ({error.code}, request {error.request_id})"
        print(f"ostler: {error}{said}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, CallRefused) or error.code == "NO_NODE" else 1) from None


# ---- what is sent


def _payload(known: Settings, args: tuple[str, ...], text: str | None) -> Any:
    given: Any = pairs(args, []) if args else None
    if text is None:
        return given
    try:
        value = json.loads(_read("-", known.max_body) if text == "-" else text)
    except ValueError as error:
        raise BadArguments(f"--payload is not JSON: {error}") from error
    if given is None:
        return value
    if not isinstance(value, dict):
        raise BadArguments("--payload must be a JSON object when there are also key=value arguments")
    if twice := value.keys() & given.keys():
        raise BadArguments(f"{min(twice)!r} is given twice: in --payload and as key=value")
    return value | given


def _file(known: Settings, path: str, kind: str | None, args: tuple[str, ...], payload: str | None) -> Body:
    if payload is not None:
        raise BadArguments("--file and --payload cannot be used together; pass form fields as key=value")
    fields = {}
    for arg in args:
        name, equals, value = arg.partition("=")
        if not equals or not name:
            raise BadArguments(f"{arg!r} is not of the form key=value")
        fields[name] = value
    guessed = kind or mimetypes.guess_type(path)[0] or "application/octet-stream"
    return Body(_read(path, known.max_body), guessed, None if path == "-" else Path(path).name, fields)


def _read(path: str, most: int) -> bytes:
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else Path(path).open("rb") as file:
            data: bytes = file.read(most + 1)
    except OSError as error:
        raise BadArguments(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > most:
        raise PayloadTooLarge(f"{path} is larger than {most} bytes, the limit for a call (max_body)")
    return data


# ---- what comes back


@contextlib.contextmanager
def _output(out: Path | None) -> Iterator[_Write]:
    """Where a result is written: the standard output, or a file that is there when it is whole."""
    if out is None:

        def write(data: bytes) -> None:
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()

        yield write
        return
    part = out.with_name(f"{out.name}.part")
    try:
        with part.open("wb") as file:
            yield file.write
        part.replace(out)
    except CallError:
        raise  # one of them is a TimeoutError, and so an OSError
    except OSError as error:
        raise BadArguments(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def _show(items: Iterator[Any], write: _Write, *, to_terminal: bool) -> None:
    text = None
    for item in items:
        if isinstance(item, (bytes, Body)):
            if to_terminal:
                what = f"{len(item)} bytes of {item.content_type}" if isinstance(item, Body) else "bytes"
                raise BadArguments(f"the result is {what}: write it to a file with --out, or redirect the output")
            write(item if isinstance(item, bytes) else item.data)
        elif isinstance(item, str):
            text = _clean(item) if to_terminal else item
            write(text.encode())
        else:
            write(json.dumps(item, indent=2 if to_terminal else None).encode() + b"\n")
    if text is not None and not text.endswith("\n"):
        write(b"\n")


def _clean(text: str) -> str:
    from ostler.cli.show import harmless  # noqa: PLC0415  it loads what draws tables

    return harmless(text)


def _described(result: Any) -> Any:
    return {"bytes": len(result), "content_type": result.content_type} if isinstance(result, Body) else result
