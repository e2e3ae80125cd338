"""What other job queues call it: hints for errors about names that Ostler does not have. Standard library only.

Type checkers do not see `Hinting`, so to them such names stay unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

_ATTEMPTS = "attempts={}, which counts all runs, the first one included"
_BACKOFF = "backoff=(first, longest), the seconds between attempts"
_POOL = "app.pool(queue, workers=…)"
_ALL = "nothing: every exception is retried, except Fail"
_LATER = "task.options(delay=…) or task.options(run_at=…)"
_ENQUEUE = "task.enqueue(…)"
_SKIP = "task.s(…)"
_CRON = "@app.job(cron=…) or app.cron(…)"
_FIND = "app.find(id)"

# What to use instead, for options of @app.job and task.options; {} is the given number plus one.
OPTIONS = {
    "retries": _ATTEMPTS, "max_retries": _ATTEMPTS, "retry": _ATTEMPTS, "max_attempts": "attempts=…", "max_tries": "attempts=…",
    "retry_backoff": _BACKOFF, "retry_backoff_max": _BACKOFF, "retry_delay": _BACKOFF, "default_retry_delay": _BACKOFF, "min_backoff": _BACKOFF,
    "autoretry_for": _ALL, "retry_on": _ALL, "throws": "raise Fail(…) for errors that are not retried",
    "time_limit": "timeout=…", "soft_time_limit": "timeout=…", "job_timeout": "timeout=…", "max_execution_time": "timeout=…",
    "bind": "nothing: the first parameter is always the job handle", "context": "nothing: the first parameter is always the job handle",
    "acks_late": "nothing: a job is only done when it has returned", "rate_limit": 'app.queue(queue, rate="100/m")',
    "concurrency": _POOL, "workers": _POOL, "lock": "at_once=1, or limit_key=… with limit_max=1", "queueing_lock": "unique=True or unique_key=…",
    "crontab": 'cron="0 3 * * *"', "schedule": 'cron="0 3 * * *"', "countdown": "delay=…", "schedule_in": "delay=…", "eta": "run_at=…",
    "schedule_at": "run_at=…", "expires": "nothing: raise Cancel in the job if it has waited too long", "queue": "another task: a task's queue is fixed",
    "result_ttl": "the setting `retention`", "ignore_result": "nothing: return None",
}  # fmt: skip

# … for those of Ostler(…) and app.pool(…).
_WORKERS = "workers=…"
APP_OPTIONS = {
    "broker": 'nothing: jobs are in the store, SQLite in the data directory unless store="postgresql://…"', "url": "store=…", "dsn": "store=…",
    "backend": "nothing: results are in the store", "include": "imports: import the modules that declare jobs in the app's file",
    "name": "nothing: an app has no name", "main": "nothing: an app has no name", "broker_url": "store=…", "connector": "store=…",
}  # fmt: skip
POOL_OPTIONS = dict.fromkeys(
    ("concurrency", "processes", "threads", "size", "max_workers", "worker_concurrency"), _WORKERS
)
POOL_OPTIONS |= {"max_tasks_per_child": "recycle_count=…", "max_memory_per_child": "recycle_rss_mb=…"}
MODULE = {
    "chain": "a.s(…).then(b.s(), into=…)", "group": "app.batch([a.s(…), …])", "chord": "app.batch([a.s(…), …], then=…)",
    "signature": _SKIP, "Celery": "Ostler()", "App": "Ostler()", "shared_task": "@app.job(…)", "task": "@app.job(…)", "actor": "@app.job(…)",
    "crontab": _CRON, "Context": "Job",
}  # fmt: skip


def option(name: str, value: Any = None) -> str:
    """What to use instead of this option, as the end of a message; empty where nothing is known."""
    if (known := OPTIONS.get(name)) is None:
        return ""
    number = value + 1 if isinstance(value, int) and not isinstance(value, bool) else "…"
    return f"; use {known.format(number)}"


class Hinting:
    """An object whose unknown attributes raise an AttributeError with a hint."""

    _hints: ClassVar[dict[str, str]] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            hint = self._hints.get(name)
            kind = type(self).__name__
            raise AttributeError(f"{kind!r} object has no attribute {name!r}{f'; use {hint}' if hint else ''}")


class Flow(Hinting):
    """A step or chain: joined with `then`, not with |."""

    if not TYPE_CHECKING:

        def __or__(self, other: object) -> Any:
            raise TypeError("steps are joined with then, not with |; use a.s(…).then(b.s(), into=…)")


APP = {
    "task": "@app.job(…)", "actor": "@app.job(…)", "shared_task": "@app.job(…)",
    "periodic": _CRON, "periodic_task": _CRON, "add_periodic_task": "app.cron(…)", "schedule": "app.cron(…)", "on_after_configure": "app.cron(…)",
    "enqueue": _ENQUEUE, "send_task": f"{_ENQUEUE}: import the task from the file that declares it, or POST /api/v1/jobs", "defer": _ENQUEUE,
    "AsyncResult": _FIND, "fetch_job": _FIND, "get_job": _FIND, "conf": "ostler.toml, see docs/settings.md",
    "autodiscover_tasks": "imports: import the modules that declare jobs in the app's file",
    "worker_main": "the command: ostler up APP", "run_worker": "the command: ostler up APP", "start": "the command: ostler up APP",
}  # fmt: skip
TASK = {
    "delay": _ENQUEUE, "apply_async": f"{_ENQUEUE}, with {_LATER}", "send": _ENQUEUE, "send_with_options": _LATER, "defer": _ENQUEUE,
    "defer_async": "await task.enqueue_async(…)", "configure": "task.options(…)", "enqueue_in": _LATER, "enqueue_at": _LATER,
    "apply": "ostler.testing.Bench, or call task.function(job, …)", "call_local": "task.function(job, …)", "si": _SKIP, "signature": _SKIP,
    "map": "task.enqueue_many([{…}, …])", "then": "task.s(…).then(…)", "retry": "raise Retry(after=…) in the job", "AsyncResult": _FIND,
}  # fmt: skip
STEP = {
    "delay": "step.enqueue()", "apply_async": f"step.enqueue(), with {_LATER}", "send": "step.enqueue()", "apply": "ostler.testing.Bench",
    "set": "task.options(…).s(…)", "link": "step.then(…)", "pipe": "step.then(…)", "run": "step.enqueue()", "get": "step.enqueue().result(timeout=…)",
}  # fmt: skip
ID = {
    "get": "job.result(timeout=…)", "wait": "job.result(timeout=…)", "return_value": "job.result(timeout=…)", "join": "job.result(timeout=…)",
    "ready": 'job.status() in ("done", "failed", "cancelled")', "successful": 'job.status() == "done"', "failed": 'job.status() == "failed"',
    "state": "job.status()", "get_status": "job.status()", "revoke": "job.cancel()", "abort": "job.cancel()", "traceback": "job.errors()",
    "exc_info": "job.errors()", "meta": "job.progress() or job.events()", "then": "task.s(…).then(…)", "refresh": "job.info()",
}  # fmt: skip
BATCH = dict.fromkeys(("get", "join", "wait", "join_native"), "batch.results(timeout=…)")
BATCH |= dict.fromkeys(("ready", "completed_count", "successful", "failed"), "batch.info()") | {
    "revoke": "batch.cancel()"
}
HANDLE = {
    "retry": "raise Retry(after=…)", "update_state": "job.progress(percent, stage) or job.event(name, data)", "meta": "job.event(name, data)",
    "save_meta": "job.event(name, data)", "request": "job.id, job.attempt", "retries": "job.attempt, which counts from 1", "log": "print or logging",
}  # fmt: skip
