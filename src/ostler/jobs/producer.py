"""The way in for a job: check, store durably, ring the doorbell. For any process; the node's HTTP uses the same checks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from ostler.errors import BadArguments, StoreBusy, StoreDoubt, StoreGone, UnknownTask
from ostler.jobs import signature
from ostler.jobs.options import check
from ostler.names import no_task

if TYPE_CHECKING:
    from ostler.config import Settings
    from ostler.jobs.foreign import Stored
    from ostler.store.rows import NewJob
    from ostler.store.store import Store


log = logging.getLogger("ostler")
T = TypeVar("T")
clock: Callable[[], int] | None = None  # a clock of its own (ms UTC): a test's that moves it


def prepare(
    tasks: Mapping[str, Mapping[str, Any]],
    task: Any,
    args: Any,
    limit: int,
    *,
    into: str | None = None,
    next: str | None = None,  # noqa: A002  as the job's field
    **options: Any,
) -> NewJob:
    """A job that can be stored, or an InputError that says what is wrong with it. `tasks` holds rows of the tasks table."""
    declared = tasks.get(task) if isinstance(task, str) else None
    if declared is None:
        raise UnknownTask(no_task(str(task), tasks))
    if type(args) is not dict and not isinstance(args, Mapping):  # the first is the quick one
        raise BadArguments(
            f"the arguments of task {task!r} must be an object of names and values, found {type(args).__name__}"
        )
    chosen = declared
    if options and (options := {name: value for name, value in options.items() if value is not None}):
        check(f"task {task!r}", options)  # what the task itself declares was checked when it was declared
        chosen = {**declared, **options}
    parameters, given = declared["parameters"], args
    if into:
        _check_waiting(task, declared.get("policy") or {}, into)
        given = {**args, into: None}
        parameters = [{**p, "type": "any"} if p["name"] == into else p for p in parameters]
    signature.check(task, parameters, given)
    encoded = signature.encode(task, args, limit)
    if models := getattr(declared, "models", None):  # those of pydantic, where their classes are loaded
        signature.loaded(task, models, dict(args))
    runs = chosen["attempts"], chosen["timeout"], chosen["priority"]
    job = _new_job()(task, declared["queue"], encoded, *runs, at_of(options) if options else None, next=next)
    if not options and not declared.get("policy"):
        return job
    return job._replace(**_policy(task, declared, signature.whole(declared["parameters"], args), options))


@cache
def _new_job() -> type[NewJob]:
    from ostler.store.rows import NewJob  # noqa: PLC0415  workers that enqueue nothing load no store

    return NewJob


def at_of(options: Mapping[str, Any]) -> int | None:
    """When the job may run (ms UTC): `delay` seconds from now, or `run_at`."""
    delay = options.get("delay")
    if delay is None:
        return options.get("run_at")
    return (time.time_ns() // 1_000_000 if clock is None else clock()) + int(delay * 1000)


def _now(store: Store) -> int:
    return store.now() if clock is None else clock()


def _check_waiting(task: str, policy: Mapping[str, Any], waiting: str | None) -> None:
    """What a step waits for cannot be part of its key: that is made before the value is known."""
    unique = policy.get("unique")
    if waiting and (waiting == policy.get("per") or unique is True or (unique and waiting in unique)):
        raise BadArguments(
            f"task {task!r}: {waiting!r} receives the result of the previous step, so it cannot be part of the unique key or limit"
        )


def _policy(
    task: str, declared: Mapping[str, Any], args: Mapping[str, Any], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Backoff, uniqueness and limits: as declared, unless this job says otherwise."""
    policy = declared.get("policy") or {}
    key, seconds = options.get("unique_key"), options.get("unique_for", policy.get("unique_for"))
    if key is not None:
        key = f"{task}:={key}"
    elif policy.get("unique"):
        names = policy["unique"]
        values = {k: v for k, v in args.items() if names is True or k in names}
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]
        key = f"{task}:{digest}"
    if seconds is not None and key is None:
        raise BadArguments(f"task {task!r}: unique_for needs a unique key; add unique_key=…")
    limit_key, most = options.get("limit_key"), options.get("limit_max", policy.get("at_once"))
    if limit_key is None and most is not None:
        per = policy.get("per")
        text = json.dumps(args.get(per)) if per else ""
        limit_key = f"{task}:{text if len(text) <= 400 else hashlib.sha256(text.encode()).hexdigest()}" if per else task
    if limit_key is not None and most is None:
        raise BadArguments(f"task {task!r}: limit_key needs limit_max, a whole number from 1")
    backoff = policy.get("backoff")
    return {
        "backoff": json.dumps(backoff) if backoff else None,
        "unique_key": key,
        "unique_for": seconds if key else None,
        "limit_key": limit_key,
        "limit_max": most if limit_key is not None else None,
    }


class _Closing:
    """Closes a thread's store when the thread has ended, as those of `asyncio.to_thread` do; not in a fork, which shares its socket."""

    def __init__(self, store: Store) -> None:
        self._store, self._pid = store, os.getpid()

    def __del__(self) -> None:
        if self._pid == os.getpid():
            with contextlib.suppress(Exception):
                self._store.close()


class Producer:
    """Stores jobs from any thread of any process; a connection per thread, made anew after a fork."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._local = threading.local()

    def prepare(self, tasks: Mapping[str, Mapping[str, Any]], task: str, args: Any, **options: Any) -> NewJob:
        """A job of one of these tasks that can be stored. Raises InputError."""
        return prepare(tasks, task, args, self.settings.max_payload, **options)

    def store(self) -> Store:
        """This thread's durable connection."""
        if getattr(self._local, "pid", None) != os.getpid():
            self._local.store, self._local.pid = self._connect(), os.getpid()
            self._local.closing = _Closing(self._local.store)
        found: Store = self._local.store
        return found

    def _connect(self) -> Store:
        from ostler import private  # noqa: PLC0415
        from ostler.store import Store, database  # noqa: PLC0415

        url, data = self.settings.store, self.settings.data_dir
        if not database.exists(url, data):
            folder = database.home(url, data)
            private.check(folder / "ostler.db", write=True)
            if not folder.exists():
                private.prepare(folder, self.settings.group)
            log.warning(
                "created a new store in %s, which no node has used yet. A data directory such as .ostler is relative to the current directory: if "
                "the node runs in another one, set OSTLER_DATA to its data directory",
                folder,
            )
        return Store.open(url, data, busy_timeout=self.settings.store_patience)

    def enqueue(self, jobs: Sequence[NewJob], connection: Any = None) -> list[int]:
        """Store all of them or none, and wake the node. What was stored survives a power cut.

        Raises StoreBusy when the store was away for all of `store_patience`: nothing was stored; or StoreDoubt, when the connection was
        lost during the commit: it may have been stored. With a `connection` of the caller's they are stored in its transaction, and
        appear with its commit.
        """
        if connection is not None:
            from ostler.jobs import foreign  # noqa: PLC0415

            return foreign.enqueue(self.settings, connection, jobs).jobs
        return self._patiently(lambda store: store.jobs.enqueue(jobs, _now(store)))

    async def enqueue_async(self, jobs: Sequence[NewJob], connection: Any = None) -> list[int]:
        """`enqueue` without blocking the event loop; a connection must be an async one."""
        if connection is None:
            import asyncio  # noqa: PLC0415

            return await asyncio.to_thread(self.enqueue, jobs)
        from ostler.jobs import foreign  # noqa: PLC0415

        return (await foreign.enqueue_async(self.settings, connection, jobs)).jobs

    def batch(
        self, jobs: Sequence[NewJob], callback: dict[str, Any] | None, connection: Any = None
    ) -> tuple[int, list[int]]:
        """Store jobs that belong together, all or none, and wake the node; (batch, jobs). Raises as `enqueue`."""
        if connection is not None:
            from ostler.jobs import foreign  # noqa: PLC0415

            return _pair(foreign.batch(self.settings, connection, jobs, callback))
        return self._patiently(lambda store: store.jobs.flows.batch(jobs, callback, _now(store)))

    def read(self, work: Callable[[Store], T]) -> T:
        """What the work finds in the store. Raises StoreBusy when the store was away for all of `store_patience`."""
        return self._patiently(work)

    def cancel(self, job: int) -> str:
        """Cancel a job, and wake the node; the status that it had. Raises NotFound or Conflict."""
        found = self._patiently(lambda store: store.jobs.cancel(job, _now(store)))
        self.wake()
        return found

    def retry(self, job: int) -> None:
        """Put an ended job back into its queue, and wake the node. Raises NotFound or Conflict."""
        self._patiently(lambda store: store.jobs.retry(job, _now(store)))
        self.wake()

    def _patiently(self, work: Callable[[Store], T]) -> T:
        """Try while nothing was stored and the patience lasts: a server that restarts is back in seconds."""
        deadline, delay = time.monotonic() + self.settings.store_patience, 0.05
        while True:
            try:
                store = self.store()
                found = work(store)
                break
            except (StoreGone, StoreDoubt):
                raise
            except StoreBusy:
                if time.monotonic() + delay > deadline:
                    raise
                time.sleep(delay)
                delay = min(2 * delay, 1.0)
        self._check(store)
        return found

    async def batch_async(
        self, jobs: Sequence[NewJob], callback: dict[str, Any] | None, connection: Any = None
    ) -> tuple[int, list[int]]:
        """`batch` without blocking the event loop; a connection must be an async one."""
        if connection is None:
            import asyncio  # noqa: PLC0415

            return await asyncio.to_thread(self.batch, jobs, callback)
        from ostler.jobs import foreign  # noqa: PLC0415

        return _pair(await foreign.batch_async(self.settings, connection, jobs, callback))

    def wake(self) -> None:
        """Let every node look for jobs now."""
        from ostler.store import database, doorbell  # noqa: PLC0415

        url, data = self.settings.store, self.settings.data_dir
        if database.is_postgres(url):
            self.store().db.ring_all()
        else:
            doorbell.ring(database.home(url, data))

    def _check(self, store: Store) -> None:
        """Make sure that what was stored went into the store that is there."""
        try:
            store.db.check()
        except StoreGone:
            from ostler.store import database  # noqa: PLC0415

            if database.exists(self.settings.store, self.settings.data_dir):
                self.close()  # another one is there now: the next try goes into that
            raise

    def close(self) -> None:
        """Close this thread's connection."""
        if getattr(self._local, "pid", None) == os.getpid():
            self._local.store.close()
            del self._local.pid


def _pair(stored: Stored) -> tuple[int, list[int]]:
    assert stored.batch is not None
    return stored.batch, stored.jobs
