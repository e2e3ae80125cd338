"""Jobs from the terminal: list, watch, cancel, retry."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import click

from ostler.calls.address import node_url
from ostler.cli import client, show
from ostler.cli.options import as_json, where
from ostler.config import Settings
from ostler.errors import BadArguments, OstlerError
from ostler.jobs.waiting import explain, leaving
from ostler.store import Store, now_ms
from ostler.store.database import place

_AT_ONCE = 10_000  # jobs that the node cancels in one request
_DATA = 1000  # characters of an event's data in the terminal
_WAITS = 1.0  # seconds that a queued job is watched before it is asked why it waits
_ENDED = ("done", "failed", "cancelled")


@click.command()
@click.argument("job", type=int, required=False)
@click.option("--status", type=click.Choice(["queued", "processing", *_ENDED]), help="Only jobs with this status.")
@click.option("--queue", help="Only jobs of this queue.")
@click.option("--task", help="Only jobs of this task.")
@click.option("--code", help="Only jobs whose error has this code.")
@click.option("--batch", type=int, help="Only jobs of this batch.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
@click.option("--cursor", type=int, help="Continue below this id.")
@click.option("--watch", is_flag=True, help="Follow the job to its end, with a progress bar.")
@click.option("--events", is_flag=True, help="Print only the timeline of JOB, all of it.")
@where
@as_json
def jobs(
    known: Settings,
    job: int | None,
    status: str | None,
    queue: str | None,
    task: str | None,
    code: str | None,
    batch: int | None,
    limit: int,
    cursor: int | None,
    watch: bool,
    events: bool,
    json_: bool,
) -> None:
    """List jobs, newest first, or show JOB with its timeline."""
    if job is None and watch:
        raise BadArguments("--watch follows one job: ostler jobs ID --watch")
    if job is None and events:
        raise BadArguments("--events shows the timeline of one job: ostler jobs ID --events")
    if job is not None and watch:
        raise SystemExit(follow(known, job, json_=json_))
    with client.open_store(known) as opened:
        if job is not None and events:
            _timeline(opened, job, json_)
            return
        if job is not None:
            found = {**opened.jobs.get(job), "waiting_for": _waiting(known, opened, job)}
            show.as_json(found) if json_ else _detail(found)
            return
        filters = {"status": status, "queue": queue, "task": task, "code": code}
        page, following = opened.jobs.list(**filters, batch=batch, limit=limit, cursor=cursor)
        client.tell_no_node(known, opened)
    if json_:
        show.as_json({"jobs": page, "next": following})
        return
    columns = (">id", "task", "queue", "status", "attempt", ">progress", "age", "stage", "last error")
    show.table(columns, map(_row, page), "no jobs")
    if following:
        print(f"older ones: --cursor {following}")


def _row(job: dict[str, Any]) -> tuple[Any, ...]:
    progress = "" if job["progress"] is None else f"{job['progress']:.0f} %"
    stage = (job["stage"] or "") if job["status"] != "done" else ""
    if job["status"] == "queued" and (job["run_at"] or 0) > now_ms():
        stage = f"runs in {show.span((job['run_at'] - now_ms()) / 1000)}"
    row = job["id"], job["task"], job["queue"], show.state(_status(job)), _attempt(job), progress
    return *row, show.ago(job["created_at"]), stage[:40], _last_error(job)


def _last_error(job: dict[str, Any]) -> str:
    """In words; the code is news only where the job chose it."""
    if job["error"] is None:
        return ""
    code = (
        "" if job["error"]["code"] in ("ERROR", "RETRIES_EXHAUSTED", "CRASH", "RETRY") else f"{job['error']['code']}: "
    )
    return f"{code}{job['last_error']}"[:80]


def _status(job: dict[str, Any]) -> str:
    """A running job that was cancelled is not simply running."""
    return "cancelling" if job["status"] == "processing" and job["cancel_requested"] else str(job["status"])


def _attempt(job: dict[str, Any]) -> str:
    return f"{job['attempt']} of {job['attempts']}"


def _waiting(known: Settings, opened: Store, job: int) -> dict[str, Any] | None:
    """Why it waits: a running node knows most, the store what any node knows."""
    if node_url(known) is not None:
        with contextlib.suppress(OstlerError):
            found: dict[str, Any] | None = client.request(known, "GET", f"/api/v1/jobs/{job}")["waiting_for"]
            return found
    where = place(known.store, known.data_dir)
    # None runs here: no heartbeat counts, however young.
    return leaving(opened.jobs.get(job), now_ms(), known.cancel_grace) or explain(
        opened, job, now_ms(), nobody=not opened.db.shared, where=where
    )


def _detail(job: dict[str, Any]) -> None:
    console = show.console()
    crashes = f", {job['crashes']} of its runs crashed" if job["crashes"] else ""
    counted = f"  attempt {_attempt(job)}{crashes}"
    console.print(f"job {job['id']}  {job['task']}  ", show.state(_status(job)), counted, sep="")
    for key in ("queue", "worker", "node", "args", "progress", "stage", "result"):
        if job[key] not in (None, "") and not (key == "stage" and job["status"] == "done"):
            value = round(job[key], 1) if key == "progress" else job[key]
            console.print(f"  {key:<9}{value if isinstance(value, str) else json.dumps(value)}")
    if waiting := job.get("waiting_for"):
        console.print(f"  {'waits':<9}{waiting['text']}")
    if job["error"]:
        label = "error" if job["status"] in _ENDED else "last error"
        console.print(f"  {label:<8} {job['error']['code']}: {job['error']['message']}")
    if job["events"] and (older := job["events"][0]["seq"] - 1):
        console.print(f"  … {older:,} older events; all of them: ostler jobs {job['id']} --events")
    for index, event in enumerate(job["events"]):
        following = job["events"][index + 1]["name"] if index + 1 < len(job["events"]) else None
        if event["name"] == following == "progress":
            continue  # of many in a row, the last one
        _event(event)
    for error in job["errors"]:
        _error(error)


def _error(error: dict[str, Any]) -> None:
    """How one run failed."""
    console = show.console()
    took = "" if error["duration_ms"] is None else f" after {show.span(error['duration_ms'] / 1000)}"
    where = f"{error['worker']} of {error['node']}" if error["node"] else error["worker"]
    console.print(f"\n  attempt {error['attempt']}, {show.clock(error['at'])}, {error['kind']} on {where}{took}")
    console.print(f"  {error['code']}: {error['message']}")
    if error["traceback"]:
        console.print(textwrap.indent(error["traceback"].rstrip(), "    "))


def _timeline(opened: Any, job: int, json_: bool) -> None:
    """A page at a time: a job may have told hundreds of megabytes. As JSON, an event in each line."""
    opened.jobs.find(job)
    after: int | None = 0
    while after is not None:
        page, after = opened.jobs.event_page(job, after)
        for event in page:
            print(json.dumps(event)) if json_ else _event(event)


def _event(event: dict[str, Any]) -> None:
    data = "" if event["data"] is None else json.dumps(event["data"])
    data = data if len(data) <= _DATA else data[: _DATA - 1] + "…"
    show.console().print(f"  {show.clock(event['at'])}  {event['name']:<18} {data}")


def follow(known: Settings, job: int, *, json_: bool) -> int:
    """Follow a job to its end; 0 when it is done, 1 otherwise. With `json_`, only the job is printed to standard output."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[stage]}", markup=False),
    )
    with client.open_store(known) as opened:
        found = opened.jobs.find(job)
        if found["status"] not in _ENDED:
            client.tell_no_node(known, opened)
        with Progress(*columns, console=show.console(), disable=json_) as bar:
            line = bar.add_task(f"job {job} {found['task']} {found['status']}", total=100, stage="")
            told, look = "no_node", time.monotonic() + _WAITS
            while True:
                found = opened.jobs.find(job)
                if found["status"] == "queued" and time.monotonic() >= look:
                    look = time.monotonic() + _WAITS
                    why = _waiting(known, opened, job)
                    if why and why["reason"] not in ("next", "line", told):
                        told = why["reason"]
                        text = f"job {job} waits: {why['text']}"
                        print(text, file=sys.stderr) if json_ else bar.console.print(text)
                percent = 100 if found["status"] == "done" else found["progress"] or 0
                bar.update(
                    line,
                    completed=percent,
                    description=f"job {job} {found['task']} {found['status']}",
                    stage=show.harmless(found["stage"] or ""),
                )
                if found["status"] in _ENDED:
                    break
                time.sleep(0.1)
        found = opened.jobs.get(job)
    show.as_json(found) if json_ else _detail(found)
    return 0 if found["status"] == "done" else 1


def _filter(function: Any) -> Any:
    for option in (
        click.option("--queue", help="All jobs of this queue."),
        click.option("--task", help="All jobs of this task."),
        click.option("--code", help="All jobs whose error has this code, such as TOXIC."),
        click.option("--batch", type=int, help="All jobs of this batch."),
    ):
        function = option(function)
    return function


def _chosen(jobs: tuple[int, ...], filters: dict[str, Any]) -> dict[str, Any]:
    given = {k: v for k, v in filters.items() if v is not None}
    if bool(jobs) == bool(given):
        known = ", ".join(f"--{name}" for name in filters)
        raise BadArguments(f"give job ids or a filter ({known}), not both")
    return given


@click.command()
@click.argument("jobs", type=int, nargs=-1)
@_filter
@where
def cancel(known: Settings, jobs: tuple[int, ...], **filters: Any) -> None:
    """Cancel jobs by id, or all that match a filter. A running job is asked to stop. If it has not ended 10 seconds later
    (the setting `cancel_grace`), it is killed along with everything it has started.
    """
    given = _chosen(jobs, filters)
    cancel_ = _cancel_by_node if node_url(known) else _cancel_in_store
    found = False
    for job, running in cancel_(known, jobs, given):
        found = True
        print(f"job {job} is {'running and was asked to stop' if running else 'cancelled'}")
    if not found:
        print("no queued or running job matches")


def _cancel_by_node(known: Settings, jobs: tuple[int, ...], given: dict[str, Any]) -> Iterator[tuple[int, bool]]:
    """The running node does it, and tells its workers at once."""
    for job in jobs:
        found = client.request(known, "POST", f"/api/v1/jobs/{job}/cancel")
        yield job, found["status"] == "processing"
    seen: set[int] = set()
    while given:
        found = client.request(known, "POST", "/api/v1/jobs/cancel", {**given, "limit": _AT_ONCE})
        fresh, running = set(found["ids"]) - seen, set(found["running"])
        yield from ((job, job in running) for job in sorted(fresh))
        seen |= fresh
        if len(found["ids"]) < _AT_ONCE or not fresh:
            return


def _cancel_in_store(known: Settings, jobs: tuple[int, ...], given: dict[str, Any]) -> Iterator[tuple[int, bool]]:
    with client.writable_store(known) as opened:
        found = (
            opened.jobs.cancel_many(now_ms(), 1_000_000, **given)
            if given
            else {j: opened.jobs.cancel(j, now_ms()) for j in jobs}
        )
    yield from ((job, status == "processing") for job, status in found.items())


@click.command()
@click.argument("jobs", type=int, nargs=-1)
@click.option(
    "--status",
    type=click.Choice(["failed", "cancelled", "done"]),
    help="With a filter: only jobs with this status (default: failed).",
)
@_filter
@where
def retry(known: Settings, jobs: tuple[int, ...], status: str | None, **filters: Any) -> None:
    """Run ended jobs again, by id or all failed ones that match a filter, with all their attempts."""
    given = _chosen(jobs, {**filters, "status": status})
    given.pop("status", None)
    with client.writable_store(known) as opened:
        if given or status:
            found = opened.jobs.retry_many(now_ms(), 1_000_000, status or "failed", **given)
        else:
            for job in jobs:
                opened.jobs.find(job)  # all of them or none
            found = {job: opened.jobs.retry(job, now_ms()) for job in jobs}
        for job, queue in found.items():
            print(f"job {job} is queued in {queue} again")
        if not found:
            print(f"no {status or 'failed'} job matches")
