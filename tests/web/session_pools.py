"""A node's session pools as the web sees them, made up: five workers, forty sessions, a line of twelve. The rest of the node is real.

Run as a program it is `ostler`, with these pools in every node: `python tests/web/session_pools.py up APP`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ostler.events import Bus, SessionBegan, SessionEnded, SessionsTouched, WorkerBroken, WorkerDrained
from ostler.sessions.views import Views
from ostler.store import now_ms

ODD = "<img src=x onerror='window.hacked=1'>"
_AGENT = "Playwright/1.65.0 (x64; debian 12) node/22.11"
_OWNERS = ("token:crawler", "token:checks", "user:1000", "token:nightly-reports")


def worker(
    number: int, in_use: int, served: int, status: str = "healthy", pool: str = "chromium", **more: Any
) -> dict[str, Any]:
    return {
        "component": f"worker:{pool}:{number}", "generation": 1 + number, "status": status, "serves": status == "healthy", "slots": 8, "in_use": in_use,
        "served": served, "lifetime": 50, "probe_ms": 0.9 + number / 7, "mb": 210.0 + 41 * number, "versions": ["1.65"],
        "started_at": now_ms() - 600_000 * (number + 1), **more,
    }  # fmt: skip


def session(number: int, component: str, **more: Any) -> dict[str, Any]:
    dice = random.Random(number)
    pool = component.split(":")[1]
    return {
        "id": f"s{number:03d}{dice.getrandbits(40):010x}", "pool": pool, "serves": pool, "component": component,
        "owner": dice.choice(_OWNERS), "client": f"10.0.{dice.randrange(9)}.{dice.randrange(250)}:{40_000 + number}", "agent": _AGENT,
        "priority": 0, "started_at": now_ms() - int(dice.expovariate(1 / 90_000)) - 500, "waited_ms": dice.choice([0.4, 0.6, 850.0]),
        "bytes_in": dice.randrange(2_000, 900_000), "bytes_out": dice.randrange(9_000, 60_000_000), "idle": round(dice.random() * 20, 1),
        "state": "live", "key": None, "via": None, "views": pool == "chromium", **more,
    }  # fmt: skip


class Pools:
    """Stands for sessions/pools.py."""

    def __init__(self, bus: Bus | None = None) -> None:
        self.bus = bus or Bus()
        self.sockets: dict[str, str] = {}
        self.elsewhere: list[str] = []
        self.neighbours: Any = None
        self.killed: list[tuple[str, str]] = []
        self.paused = False
        self.workers = {
            "chromium": [
                worker(0, 8, 31),
                worker(1, 8, 22),
                worker(2, 8, 17),
                worker(3, 8, 9),
                worker(4, 3, 50, "draining"),
            ],
            "terminal": [worker(0, 5, 12, pool="terminal", lifetime=0, versions=[], probe_ms=None, slots=10)],
        }
        numbers = iter(range(1000))
        self.sessions = [
            session(next(numbers), one["component"])
            for found in self.workers.values()
            for one in found
            for _ in range(one["in_use"])
        ]
        self.sessions[0] |= {"owner": ODD, "agent": ODD, "client": ODD, "key": ODD}
        self.sessions[1] |= {"state": "opening", "bytes_in": 0, "bytes_out": 0, "idle": None}
        self.sessions[2] |= {"state": "detached", "key": "cart-7"}
        self.waiting: dict[str, list[tuple[str, int, float]]] = {
            "chromium": [(_OWNERS[n % 4], 10 if n == 0 else 0, 14.2 - 1.1 * n) for n in range(12)]
        }

    def capacity(self) -> dict[str, Any]:
        found = {}
        for name, workers in self.workers.items():
            serving = [one for one in workers if one["serves"]]
            slots, used = sum(one["slots"] for one in serving), sum(one["in_use"] for one in serving)
            found[name] = {"pools": [name], "slots": slots, "in_use": sum(one["in_use"] for one in workers), "free": slots - used,
                           "waiting": len(self.waiting.get(name, ())), "workers": workers, "paused": self.paused}  # fmt: skip
        return found

    def live(self) -> list[dict[str, Any]]:
        return [dict(one) for one in self.sessions]

    def lines(self) -> dict[str, Any]:
        return {name: {"total": len(line), "first": line} for name, line in self.waiting.items()}

    def counts(self) -> dict[str, Any]:
        counted = {
            "admitted": 141,
            "refused": 3,
            "left": 2,
            "expired": 1,
            "bytes_in": 9_000_000,
            "bytes_out": 1_400_000_000,
            "strikes": 4,
        }
        return dict.fromkeys(self.workers, counted)

    def kill(self, session: str, by: str) -> bool:
        for place, one in enumerate(self.sessions):
            if one["id"] == session:
                del self.sessions[place]
                self.killed.append((session, by))
                for found in self.workers[one["serves"]]:
                    if found["component"] == one["component"]:
                        found["in_use"] -= 1
                self.bus.send(SessionEnded(session, one["serves"], one["component"], one["owner"], "killed", 12.5, by))
                self.bus.send(SessionsTouched())
                return True
        return False

    # ---- what tests have it do

    def pause(self) -> None:
        self.paused = not self.paused

    def empty_line(self) -> None:
        self.waiting.clear()

    def stop_all(self) -> None:
        for one in self.workers["chromium"]:
            one |= {"status": "draining", "serves": False}

    def end_one(self) -> None:
        self.kill(self.sessions[5]["id"], "user:0")

    # ----

    async def end_elsewhere(self, session: str) -> bool:
        return session in self.elsewhere

    def view_socket(self, session: str) -> str | None:
        known = any(one["id"] == session for one in self.sessions)
        return self.sockets.get(session, self.sockets.get("*")) if known else None


# ---- as a program


class Pictures:
    """A live view as workers serve it: the frames in a folder, one after another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def view(self, session: Any) -> AsyncIterator[bytes]:
        frames = sorted(self._folder.glob("*.jpg"))
        for frame in itertools.cycle(frames):
            yield frame.read_bytes()
            await asyncio.sleep(0.2 if len(frames) > 1 else 3600)  # one picture: nothing changes any more


async def _act(pools: Pools, folder: Path) -> None:
    """Show pictures, let some things happen, then do what a test writes into the file `act`."""
    watched = {one["id"]: SimpleNamespace(id=one["id"]) for one in pools.sessions}
    views = Views(Pictures(folder), watched, str(folder / "made-up.view.sock"))
    pools.sockets["*"] = await views.start()
    for waited in (0.0004, 0.3, 7.5):
        pools.bus.send(SessionBegan("chromium", waited))
    pools.bus.send(SessionEnded("s1", "chromium", "worker:chromium:0", "token:crawler", "client", 3.0))
    pools.bus.send(WorkerDrained("worker:chromium:4", "chromium", 30.0, 2))
    pools.bus.send(WorkerBroken("worker:chromium:1", "chromium", "hung", "two probes in a row were not answered", 5))
    while True:
        if (folder / "act").exists():
            verb = (folder / "act").read_text()
            getattr(pools, verb)()
            pools.bus.send(SessionsTouched())
            (folder / "act").unlink()  # it is done
        await asyncio.sleep(0.02)


def main() -> None:
    from ostler import runtime
    from ostler.cli import main as run

    pools: list[Pools] = []
    tasks = []
    Metrics, Context, Watch = runtime.Metrics, runtime.Context, runtime.Watch

    def metrics(bus: Bus) -> Any:
        pools.append(Pools(bus))
        return Metrics(bus)

    def watch(*parts: Any, **more: Any) -> Any:
        return Watch(*parts, **{**more, "sessions": pools[-1]})

    def context(**parts: Any) -> Any:
        tasks.append(asyncio.get_running_loop().create_task(_act(pools[-1], parts["settings"].data_dir)))
        return Context(**{**parts, "sessions": pools[-1]})

    runtime.Metrics, runtime.Watch, runtime.Context = metrics, watch, context  # type: ignore[assignment,misc]
    run()


if __name__ == "__main__":
    main()
