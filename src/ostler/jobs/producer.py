"""The way in for a job: check, store durably, ring the doorbell. For any process; the node's HTTP uses the same checks."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ostler.errors import BadArguments, UnknownTask
from ostler.jobs import signature

if TYPE_CHECKING:
    from ostler.config import Settings
    from ostler.store.rows import NewJob
    from ostler.store.store import Store


def prepare(tasks: Mapping[str, Mapping[str, Any]], task: Any, args: Any, limit: int, **options: Any) -> NewJob:
    """A job that can be stored, or an InputError that says what is wrong with it. `tasks` holds rows of the tasks table."""
    from ostler.store.rows import NewJob  # noqa: PLC0415  workers that enqueue nothing load no store

    declared = tasks.get(task) if isinstance(task, str) else None
    if declared is None:
        raise UnknownTask(f"there is no task {task!r}; declared are: {', '.join(sorted(tasks)) or 'none'}")
    if not isinstance(args, Mapping):
        raise BadArguments(
            f"the arguments of task {task!r} must be an object of names and values, found {type(args).__name__}"
        )
    signature.check(task, declared["parameters"], args)
    chosen = {
        key: declared[key] if options.get(key) is None else options[key] for key in ("attempts", "timeout", "priority")
    }
    check_options(f"task {task!r}", **chosen)
    return NewJob(task, declared["queue"], signature.encode(task, args, limit), run_at=options.get("run_at"), **chosen)


def check_options(whose: str, *, attempts: Any, timeout: Any, priority: Any) -> None:
    """Raise BadArguments unless the numbers can be used."""
    if not isinstance(attempts, int) or isinstance(attempts, bool) or not 1 <= attempts <= 1000:
        raise BadArguments(f"{whose}: attempts must be a whole number from 1 to 1000, found {attempts!r}")
    if timeout is not None and (
        not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout < 1e9
    ):
        raise BadArguments(f"{whose}: timeout must be more than 0 seconds, found {timeout!r}")
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > 1_000_000:
        raise BadArguments(f"{whose}: priority must be a whole number from -1000000 to 1000000, found {priority!r}")


class Producer:
    """Stores jobs from any thread of any process; a connection per thread, made anew after a fork."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._local = threading.local()

    def store(self) -> Store:
        """This thread's durable connection."""
        from ostler.store import Store  # noqa: PLC0415

        if getattr(self._local, "pid", None) != os.getpid():
            settings = self.settings
            self._local.store = Store.open(settings.store, settings.data_dir, busy_timeout=settings.store_patience)
            self._local.pid = os.getpid()
        found: Store = self._local.store
        return found

    def enqueue(self, jobs: Sequence[NewJob]) -> list[int]:
        """Store all of them or none, and wake the node. What was stored survives a power cut. Raises StoreBusy."""
        from ostler.store import now_ms  # noqa: PLC0415
        from ostler.store.doorbell import ring  # noqa: PLC0415

        store = self.store()
        ids = store.jobs.enqueue(jobs, now_ms())
        ring(store.db.path.parent)
        return ids

    def close(self) -> None:
        """Close this thread's connection."""
        if getattr(self._local, "pid", None) == os.getpid():
            self._local.store.close()
            del self._local.pid
