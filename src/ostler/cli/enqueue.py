"""`ostler enqueue`: a job from the terminal, with its arguments and options."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import click

from ostler.calls.address import node_url
from ostler.calls.model import seconds
from ostler.cli import client, show
from ostler.cli.jobs import follow
from ostler.cli.options import as_json, where
from ostler.config import Settings
from ostler.errors import BadArguments, ConfigError
from ostler.jobs import kinds
from ostler.jobs.options import OPTIONS
from ostler.jobs.producer import prepare


class _Moment(click.ParamType[int]):
    """A point in time, as milliseconds UTC. Without a zone it is a local time."""

    name = "time"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            if value.lstrip("-").isdecimal() and len(value) != len("20260131"):
                return int(value)
            return round(datetime.fromisoformat(value).timestamp() * 1000)
        except (ValueError, OverflowError, OSError):
            self.fail(f"{value!r} is neither a time such as 2026-01-31T09:30, with or without a zone, nor milliseconds UTC", param, ctx)  # fmt: skip


class _Seconds(click.ParamType[float]):
    """A duration: seconds, or a number with a unit."""

    name = "duration"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return seconds(value, "it")
        except ConfigError:
            self.fail(f"{value!r} is neither a number of seconds nor a duration such as 5m or 2h", param, ctx)


def _job_options(function: Any) -> Any:
    for name, option in reversed(OPTIONS.items()):
        flag = f"--{name.replace('_', '-')}"
        kind, wanted = {
            "run_at": (_Moment(), "ISO 8601, or milliseconds UTC"),
            "delay": (_Seconds(), "seconds, or 5m"),
            "timeout": (_Seconds(), "seconds, or 5m"),
            "unique_for": (_Seconds(), "seconds, or 5m"),
        }.get(name, (option.kind, option.wanted))
        doc = f"{option.doc[0].upper()}{option.doc[1:]}"
        function = click.option(flag, name, type=kind, help=f"{doc} ({wanted}).")(function)
    return function


@click.command()
@click.argument("task")
@click.argument("args", nargs=-1, metavar="[KEY=VALUE]…")
@click.option("--args", "args_json", metavar="JSON", help="All arguments as one JSON object.")
@_job_options
@click.option("--watch", is_flag=True, help="Wait until the job has ended, with a progress bar.")
@where
@as_json
def enqueue(
    known: Settings,
    task: str,
    args: tuple[str, ...],
    args_json: str | None,
    watch: bool,
    json_: bool,
    **options: Any,
) -> None:
    """Enqueue a job. Works with or without a running node.

    A VALUE that is valid JSON is parsed, anything else is text. For a parameter declared as `str` it is always text.
    """
    with client.writable_store(known) as opened:
        tasks = opened.jobs.tasks()
        values, given = _object(args_json), pairs(args, tasks.get(task, {}).get("parameters", []))
        if twice := values.keys() & given.keys():
            raise BadArguments(f"{min(twice)!r} is given twice: in --args and as key=value")
        values |= given
        made = prepare(tasks, task, values, known.max_payload, **options)
        if opened.db.shared or not _has_models(tasks[task]) or node_url(known) is None:
            job, new = opened.jobs.put([made], opened.now())[0]
        else:  # only the node has the classes that check them
            wanted = {"task": task, "args": values, **{name: v for name, v in options.items() if v is not None}}
            answer = client.request(known, "POST", "/api/v1/jobs", wanted)
            job, new = answer["id"], not answer["duplicate"]
        if not (new or json_):
            print(f"job {job} already has this unique key; no new job was stored")
        if watch:
            raise SystemExit(follow(known, job, json_=json_))
        if json_:
            show.as_json({**opened.jobs.get(job), "duplicate": not new})
        elif new:
            print(f"job {job} is queued in {opened.jobs.get(job)['queue']}; follow it with: ostler jobs {job} --watch")
        client.tell_no_node(known, opened)


def _has_models(task: dict[str, Any]) -> bool:
    return any(kinds.has_model(p.get("type")) for p in task["parameters"])


def _object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise BadArguments(f"--args is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadArguments("--args must be a JSON object such as '{\"a\": 1}'")
    return value


def pairs(given: tuple[str, ...], parameters: list[dict[str, Any]]) -> dict[str, Any]:
    """Arguments of the form key=value; raises BadArguments."""
    types = {p["name"]: p.get("type") for p in parameters}
    values: dict[str, Any] = {}
    for pair in given:
        key, equals, text = pair.partition("=")
        if not equals or not key:
            raise BadArguments(f"{pair!r} is not of the form key=value")
        if key in values:
            raise BadArguments(f"{key!r} is given twice")
        kind = types.get(key, "any")
        try:
            value = text if kind == "str" else json.loads(text)
        except ValueError:
            value = text
        values[key] = text if kinds.fits(kind, text) and not kinds.fits(kind, value) else value
    return values
