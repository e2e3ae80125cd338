"""How an app stores jobs and finds them again, from jobs and from other programs. The store is opened on first use."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ostler import loading
from ostler.flows import Chain, Step, store_batch, store_batch_async
from ostler.handles import BatchId, JobId, Status, listed
from ostler.task import Task

# Loaded where they are needed: every model's worker imports this module, and should start fast.
if TYPE_CHECKING:
    from ostler.config import Settings
    from ostler.jobs.awaiting import Awaiting
    from ostler.jobs.producer import Producer

R = TypeVar("R")


class Storing:
    """The methods of an app that use the store: they enqueue, find and list jobs. Tasks, steps and ids use its producer."""

    store: str | None
    data: str | None
    tasks: dict[str, Task[..., Any]]
    _producer: Producer | None = None
    _awaiting: Awaiting | None = None
    _node: Settings | None = None

    def batch(
        self,
        steps: Iterable[Step[R] | Chain[R]],
        *,
        then: Step[Any] | None = None,
        into: str | None = None,
        connection: Any = None,
    ) -> BatchId[R]:
        """Enqueue several jobs together, all or none. When the last of them has ended, `then` is enqueued once; its parameter `into`
        gets {"batch": number, "total": …, "failed": …}, and `find_batch(number)` reads the results. With `connection`, the batch is stored in
        that connection's transaction.
        """
        return store_batch(self, steps, then, into, connection)

    async def batch_async(
        self,
        steps: Iterable[Step[R] | Chain[R]],
        *,
        then: Step[Any] | None = None,
        into: str | None = None,
        connection: Any = None,
    ) -> BatchId[R]:
        """Like `batch`, without blocking the event loop."""
        return await store_batch_async(self, steps, then, into, connection)

    def find(self, job: int) -> JobId[Any]:
        """Find a job by its id, to read its status or wait for its result. Raises NotFound."""
        found = JobId[Any].of(self, job)
        found.info()
        return found

    def jobs(
        self,
        *,
        task: Task[..., Any] | str | None = None,
        status: Status | None = None,
        queue: str | None = None,
        limit: int = 50,
        before: int | None = None,
    ) -> list[JobId[Any]]:
        """The newest jobs, newest first: of this task (or name of a task), status and queue. `before`: only those with a lower id, for the
        next page.
        """
        found: list[JobId[Any]] = listed(
            self, status, task.name if isinstance(task, Task) else task, queue, limit, before
        )
        return found

    def find_batch(self, batch: int) -> BatchId[Any]:
        """Find a batch by its number, to read the results of its jobs. Raises NotFound."""
        found = BatchId[Any].of(self, batch)
        found.info()
        return found

    def wake(self) -> None:
        """Let the nodes look for new jobs now. Call it after you have committed a SQLite transaction in which jobs were enqueued with
        `connection=`; otherwise the node finds them with its next poll (`poll_interval`). On PostgreSQL the commit wakes the nodes.
        """
        self.producer.wake()

    @property
    def producer(self) -> Producer:
        """Enqueues jobs for this app; created on first use. Raises ConfigError while an app is being loaded."""
        loading.refuse()
        if self._producer is None:
            from ostler.jobs.producer import Producer  # noqa: PLC0415

            self._producer = Producer(self.settings())
        return self._producer

    @property
    def awaiting(self) -> Awaiting:
        """Waits for jobs of this app; created on first use."""
        producer = self.producer
        if self._awaiting is None or self._awaiting.producer is not producer:
            from ostler.jobs.awaiting import Awaiting  # noqa: PLC0415

            self._awaiting = Awaiting(producer)
        return self._awaiting

    def serve(self, settings: Settings) -> None:
        """In a node: what routes of the app's own enqueue, find and call is this node's, whatever flags it was started with."""
        self._node = settings

    def settings(self, flags: dict[str, Any] | None = None, file: Path | None = None) -> Settings:
        """The settings that apply in this process."""
        if self._node is not None and flags is None and file is None:
            return self._node
        from ostler import config  # noqa: PLC0415

        return config.load(flags, code={"store": self.store, "data": self.data}, file=file)
