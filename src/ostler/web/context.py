"""What the routes may use: the node's parts, handed in once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ostler.calls.records import CallLog
from ostler.config import Settings
from ostler.jobs.dispatcher import Dispatcher
from ostler.jobs.intake import Intake
from ostler.jobs.poll import Poll
from ostler.lifecycle.control import Control
from ostler.lifecycle.supervisor import Supervisor
from ostler.live.broker import Broker
from ostler.live.tails import Tails
from ostler.live.waiters import Waiters
from ostler.live.watch import Watch
from ostler.sessions.shown import Sessions
from ostler.store import now_ms
from ostler.store.lanes import Lane

if TYPE_CHECKING:
    from ostler.calls.wishes import Wishes
    from ostler.web.metrics import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The node, as the web sees it. `glance` is for short reads, `reader` for those that may take long; `writer` is the
    durable lane for what operators ask. `secret` is what the nodes of the store know each other by.
    """

    settings: Settings
    supervisor: Supervisor
    control: Control
    dispatcher: Dispatcher
    poll: Poll
    intake: Intake
    glance: Lane
    reader: Lane
    writer: Lane
    tasks: dict[str, dict[str, Any]]
    url: str
    lanes: list[Lane]
    metrics: Metrics
    broker: Broker
    watch: Watch
    tails: Tails
    waiters: Waiters
    secret: str
    models: Callable[[], dict[str, dict[str, Any]]]  # those that can be called, and how they are
    gpu_lock: Callable[[], bool | None]  # in exclusive mode: whether a call has the GPUs
    wishes: Wishes | None
    elsewhere: Callable[[], list[dict[str, Any]]]  # models of other nodes
    calls: CallLog
    envs: Callable[[], list[dict[str, Any]]]  # it reads files
    sessions: Sessions | None = None
    pages: list[dict[str, str]] = field(default_factory=list)  # of the app: their titles and paths
    started_at: int = field(default_factory=now_ms)
