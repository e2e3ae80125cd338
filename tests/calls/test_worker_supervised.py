"""A model's worker under the one lifecycle: started by the supervisor from what `launch` says, drained, and failing to load."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from ostler.calls.launch import launch
from ostler.calls.model import ModelOptions
from ostler.config import Settings
from ostler.events import Bus
from ostler.lifecycle.membership import Membership
from ostler.lifecycle.state import Status
from ostler.lifecycle.supervisor import Supervisor
from ostler.lifecycle.worker import Exit, Left, Nothing, PoolSpec, Worker
from ostler.parts import running
from ostler.store import Store
from ostler.store.lanes import Lane
from ostler.store.nodes import NodeRow
from tests.calls.bench import PATIENCE, PYTHON, ZOO, Client


OPTIONS = ModelOptions(env=None if PYTHON == sys.executable else "other")


class Models(Nothing):
    """A tenant that only listens."""

    kind = "models"

    def __init__(self) -> None:
        self.infos: list[dict[str, Any]] = []
        self.frames: list[list[Any]] = []
        self.exits: list[tuple[str, str]] = []

    def ready(self, worker: Worker, info: Any) -> None:
        self.infos.append(dict(info))

    def heard(self, worker: Worker, frame: list[Any]) -> None:
        self.frames.append(frame)

    def gone(self, worker: Worker, end: Exit) -> Left:
        self.exits.append((end.reason, end.kind))
        return Left()


async def until(found: Any, what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        await asyncio.sleep(0.005)


def test_the_supervisor_starts_drains_and_blames_a_models_worker(tmp_path: Path, monkeypatch) -> None:
    run = tmp_path / "run"
    run.mkdir(0o700)
    monkeypatch.setenv("ZOO_NOTES", str(run))

    def argv(slot: Any) -> list[str]:
        name = f"loads.{slot.number}.{slot.generation}.sock"
        return launch(PYTHON, str(ZOO), "loads", slot.key, OPTIONS, run=str(run), socket=name)

    async def main() -> None:
        settings = Settings(data=str(tmp_path), name="n1", heartbeat_interval=0.1, stale_after=30, backoff_max=0.1)
        tenant, loop = Models(), asyncio.get_running_loop()
        lanes = [Lane(name, lambda: Store.open("", tmp_path), loop) for name in ("records", "intake")]
        member = Membership(settings, NodeRow("n1", "n1", 30_000))
        with Store.open("", tmp_path) as store:
            store.nodes.register(member.row)
        spec = PoolSpec("loads", 0, argv, tenant=tenant, on_demand=True)
        supervisor = Supervisor(settings, *lanes, Bus(), [spec], member)
        async with running([*lanes, supervisor]):
            slot = supervisor.open("loads", "org/steps:1")
            supervisor.start_slot(slot)
            await until(lambda: tenant.infos, "ready")
            path = run / tenant.infos[0]["socket"]
            assert path.name == "loads.0.1.sock"
            answer = await asyncio.to_thread(lambda: Client(path).call({"note": "called"}))
            assert answer.result == "ok"
            supervisor.stop_slot(slot)
            await until(lambda: slot.status is Status.STOPPED, "it to stop")
            assert tenant.exits == [("stopped", "asked")]
            assert (run / "unloaded").exists()
            broken = supervisor.open("loads", "broken")
            supervisor.start_slot(broken)
            await until(lambda: len(tenant.exits) > 1, "the failure")
            assert tenant.exits[1] == ("model-load", "crash")
            assert ["failed", "OSError: weights.bin is not there"] in tenant.frames
            supervisor.stop_slot(broken)

    asyncio.run(main())
