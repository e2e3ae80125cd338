"""One run of a job: its arguments are checked, its function is called, and what came of it is a frame. Standard library alone.

Workers and `ostler.testing` run jobs through `run`, so a test sees the results, messages and limits that a node would give.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import traceback
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ostler.errors import BadArguments
from ostler.jobs import handle, kinds, signature
from ostler.jobs.handle import Job
from ostler.jobs.outcome import CANCELLED, Cancel, Cancelled, Fail, Retry, Snooze, is_wait
from ostler.jobs.results import LostClaim

if TYPE_CHECKING:
    from ostler.task import Task

_TRACE, _HEAD = 8000, 2000  # characters of a traceback that are kept, and how many of them from its beginning
# Files of the first frames.
_NOT_THEIRS = (str(Path(__file__).parent), str(Path(traceback.__file__).parent / "asyncio"))
_EXPECTED = (Fail, Retry, Snooze, Cancel, Cancelled, LostClaim)

# ("done", job, fence, result as JSON) or ("fail", job, fence, kind, error, seconds to wait or None)
Outcome = tuple[Any, ...]

_is_async = functools.lru_cache(maxsize=1024)(inspect.iscoroutinefunction)
_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=kinds.simple).encode


def run(
    task: Task[..., Any] | None,
    job: Job,
    args: str,
    *,
    wait: Callable[[Coroutine[Any, Any, Any]], Any],
    max_result: int,
    passing: tuple[type[BaseException], ...],
) -> Outcome:
    """Run the task and tell how it went. `wait` runs a coroutine to its end. Raises nothing but the exceptions in `passing`,
    whatever the job does, also while its exception is put into words.
    """
    id_, fence = job.id, job.fence  # the job can change its handle; the frame has to name the claim
    try:
        if task is None:
            raise Fail("UNKNOWN_TASK", f"this app declares no task {job.task!r}; declare it again, then retry the job")
        values = _values(task, args)
        handle.running = job
        result = task.function(job, **values)
        if _is_async(task.function):
            result = wait(result)
        return ("done", id_, fence, _encode(result, max_result))
    except passing:
        raise
    except BaseException as error:  # noqa: BLE001  sys.exit() in a job ends the job, not the worker
        try:
            return ("fail", id_, fence, *_failed(error, cancelled=bool(job.cancelled)))
        except passing:
            raise
        except BaseException:  # noqa: BLE001
            what = {"code": "ERROR", "message": "it raised an exception that cannot be displayed"}
            return ("fail", id_, fence, "transient", what, None)
    finally:
        handle.running = None


def _values(task: Task[..., Any], args: str) -> dict[str, Any]:
    """The job's own arguments. Only here a BadArguments is about them: one that the function raises is an exception like any other."""
    values: dict[str, Any] = json.loads(args)
    try:
        signature.check(task.name, task.parameters, values)
        return signature.loaded(task.name, task.loads, values) if task.loads else values
    except BadArguments as error:
        raise Fail(error.code, str(error)) from error.__cause__


def _failed(error: BaseException, *, cancelled: bool) -> tuple[str, dict[str, str], float | None]:
    """(kind, error, after) of a run that raised. An exception of a subclass may lack what its class promises."""
    kind, code = _kind(error, cancelled=cancelled)
    after = getattr(error, "after", None) if kind in ("transient", "snooze") else None
    expected = isinstance(error, _EXPECTED)
    if kind == "cancelled" and not isinstance(error, Cancel):
        return kind, {"code": "CANCELLED", "message": CANCELLED}, None
    words = _words(error)
    message = (words or type(error).__name__) if expected else f"{type(error).__name__}: {words}"
    what = {"code": _words(code)[:200], "message": message[:2000]}
    if not expected or error.__cause__ is not None:
        with contextlib.suppress(Exception):  # an exception may break while it is shown
            trace = traceback.format_exception(type(error), error, _own(error.__traceback__))
            what["traceback"] = shortened("".join(trace))
    return kind, what, after if is_wait(after) else None


def _kind(error: BaseException, *, cancelled: bool) -> tuple[str, object]:
    """The kind that `verdict.failure` knows, and the code."""
    match error:
        case Fail():
            return "permanent", getattr(error, "code", "FAILED")
        case Retry():
            return "transient", "RETRY"
        case Snooze():  # without a time to wait it is a retry: it must not run again and again for nothing
            return ("snooze", "SNOOZED") if is_wait(getattr(error, "after", None)) else ("transient", "RETRY")
        case Cancel():
            return "cancelled", "CANCELLED"
        case LostClaim():
            return "transient", error.code
        case MemoryError():
            return "transient", "OOM"
        case Cancelled():
            return "cancelled" if cancelled else "transient", "CANCELLED"
        case _ if cancelled and type(error).__name__ == "CancelledError":  # asyncio's
            return "cancelled", "CANCELLED"
        case _:
            return "transient", "ERROR"


def _encode(result: Any, most: int) -> str:
    if result is None:
        return "null"
    try:
        text = _json(result)
        signature.check_depth(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise Fail("BAD_RESULT", f"the result ({type(result).__name__}) cannot be written as JSON: {error}") from error
    if len(text) > most:
        raise Fail("RESULT_TOO_LARGE", f"the result is {len(text)} bytes as JSON, more than max_payload ({most})")
    return text


def _own(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the user's first frame on."""
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename.startswith(_NOT_THEIRS):
        first = first.tb_next
    return first or trace


def shortened(text: str) -> str:
    """A traceback of bounded length: what is left out is its middle. The first cause stands at the beginning, the exception at the end."""
    if len(text) <= _TRACE:
        return text
    return f"{text[:_HEAD]}\n… {len(text) - _TRACE:,} characters left out …\n{text[_HEAD - _TRACE :]}"


def _words(value: object) -> str:
    """Text that any reader can decode: messages with file names in them may hold bytes that are no characters."""
    try:
        return str(value).encode("utf-8", "replace").decode()
    except (Exception, SystemExit) as broken:  # noqa: BLE001
        return f"(its message cannot be shown: {type(broken).__name__})"
