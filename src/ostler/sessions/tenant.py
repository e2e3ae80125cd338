"""What the lifecycle tells of session workers, and what it asks: it goes to the node's session pools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ostler.lifecycle.process import Ended
from ostler.lifecycle.wire import Frame
from ostler.lifecycle.worker import Doing, Exit, Left, Nothing, Worker

if TYPE_CHECKING:
    from ostler.sessions.pools import SessionPools


class Sessions(Nothing):
    """The tenant of session pools."""

    kind = "sessions"

    def __init__(self, pools: SessionPools) -> None:
        self._pools = pools

    def ready(self, worker: Worker, info: Mapping[str, Any]) -> None:
        self._pools.is_up(worker)

    def beat(self, worker: Worker, facts: Any) -> Any:
        self._pools.beat(worker, facts)

    def heard(self, worker: Worker, frame: Frame) -> None:
        self._pools.said(worker, frame)

    def busy(self, worker: Worker) -> bool:
        return self._pools.is_busy(worker)

    def doing(self, worker: Worker) -> Doing | None:
        serving = self._pools.of(worker)
        return Doing("", f"{len(serving.live)} sessions") if serving and serving.live else None

    def drain(self, worker: Worker) -> None:
        self._pools.close(worker)

    def died(self, worker: Worker, ended: Ended) -> None:
        self._pools.is_dead(worker, ended)

    def gone(self, worker: Worker, end: Exit) -> Left:
        return self._pools.is_gone(worker, end)
