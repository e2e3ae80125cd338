"""Models that are parked: their device memory is on the host, their process sleeps, and the next call wakes it.

A model's own `park()` and `wake()` are used where it has them, else the driver's checkpoint of processes, by a helper process
(lifecycle/checkpoint.py). Whether a worker that is not needed is parked or ended is decided by cost. One that cannot be parked is
ended; one that cannot be woken is killed and replaced, and the calls that wait for it wait for the new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostler.lifecycle.admission import HOST
from ostler.lifecycle.worker import Worker

if TYPE_CHECKING:
    from ostler.calls.gateway import Gateway
    from ostler.lifecycle.ticket import Ticket

log = logging.getLogger("ostler.calls")

NOT_ASKED = "the driver was not asked yet"
_OFTEN = 4  # calls after which a model is taken to be needed again
_AT_LEISURE = 0.1  # of its time counts what nobody waits for
_SLOWEST = 100.0  # MB/s; a helper that is slower than that, and 30 s, is given up


@dataclass(slots=True)
class Rates:
    """MB per second, as last measured; at first what an H200 did."""

    park: float = 2000.0
    wake: float = 6000.0

    def saw(self, which: str, mb: float, seconds: float) -> None:
        """Half of what is new: a small model says little about a large one."""
        if mb > 0 and seconds > 0:
            setattr(self, which, (getattr(self, which) + mb / seconds) / 2)


def is_worth(rates: Rates, *, mb: float, load_s: float, served: int, host_room_mb: float, hurried: bool) -> bool:
    """Whether parking is cheaper than loading again. `hurried`: somebody waits for the memory, and so for the copy."""
    if mb > host_room_mb:
        return False
    saved = load_s - mb / rates.wake
    return saved * min(1.0, served / _OFTEN) > mb / rates.park * (1.0 if hurried else _AT_LEISURE)


class Helpers:
    """Processes of lifecycle/checkpoint.py. One that is idle is kept: it has the driver at hand."""

    def __init__(self) -> None:
        self._idle: asyncio.subprocess.Process | None = None

    async def ask(self, what: str, pid: int, patience: float) -> str | None:
        """None when it was done, else what was wrong."""
        helper, self._idle = self._idle, None
        try:
            async with asyncio.timeout(patience):
                if helper is None or helper.returncode is not None:
                    helper = await self._start()
                said = await self._say(helper, f"{what} {pid}\n")
        except TimeoutError:
            said = {"error": f"the driver has not answered for {patience:.0f} s"}
        except OSError as error:
            said = {"error": f"the helper cannot be used: {error}"}
        except BaseException:
            _end(helper)
            raise
        if said is None or "has not answered" in str(said.get("error")) or self._idle is not None:
            _end(helper)
        else:
            self._idle = helper
        if said is None:
            return "the helper has ended without an answer"
        return str(said["error"]) if "error" in said else None

    async def _start(self) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "ostler.lifecycle.checkpoint"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )

    async def _say(self, helper: asyncio.subprocess.Process, line: str) -> dict[str, object] | None:
        assert helper.stdin is not None
        assert helper.stdout is not None
        helper.stdin.write(line.encode())
        await helper.stdin.drain()
        try:
            said = json.loads(await helper.stdout.readline())
        except ValueError:
            return None
        return said if isinstance(said, dict) else None

    def close(self) -> None:
        """End the one that is kept."""
        _end(self._idle)
        self._idle = None


def _end(helper: asyncio.subprocess.Process | None) -> None:
    if helper is not None and helper.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            helper.kill()


class Parking:
    """All parked models of a node."""

    def __init__(self, gateway: Gateway, expires: float) -> None:
        self._gateway, self._expires = gateway, expires
        self.rates = Rates()
        self.states: dict[Worker, str] = {}  # parking, parked, waking
        self._helpers = Helpers()
        self._wanted: set[Worker] = set()  # asked for while they were being parked
        self._ends: dict[Worker, asyncio.TimerHandle] = {}
        self.driver: str | None = NOT_ASKED
        """Why the driver does not park; None: it does."""

    def close(self) -> None:
        """The node stops."""
        self._helpers.close()

    async def look(self) -> None:
        """Ask the driver whether it can, once."""
        self.driver = await self._helpers.ask("probe", 0, 30.0)
        log.info("models can be parked%s", "" if self.driver is None else f" only by themselves: {self.driver}")

    # ---- to sleep

    def begin(self, worker: Worker, *, hurried: bool) -> bool:
        """Park the worker, in which nobody is and which nobody can enter, if that is worth it. False: have it end instead."""
        ticket = worker.ticket
        if (
            ticket is None
            or ticket.device is None
            or not self._can(worker)
            or not self._is_wanted(worker, ticket, hurried=hurried)
        ):
            return False
        self.states[worker] = "parking"
        log.info("%s is parked", worker.component)
        self._do(worker, "park", ticket)
        return True

    def _can(self, worker: Worker) -> bool:
        return bool(worker.info.get("parks")) or self.driver is None

    def _is_wanted(self, worker: Worker, ticket: Ticket, *, hurried: bool) -> bool:
        wish = self._gateway.options_of(worker.slot).park
        mb, room = ticket.seen.gpu_mb or ticket.need.gpu_mb, self._host_room()
        if wish is not None:
            return wish and mb <= room
        load_s = max(0.0, worker.ready_at - worker.started)
        return is_worth(self.rates, mb=mb, load_s=load_s, served=worker.served, host_room_mb=room, hurried=hurried)

    def _host_room(self) -> float:
        ledger = self._gateway.supervisor.ledger
        host = ledger.snapshot()["host"] if ledger else None
        return float(host["room_mb"]) if host else 0.0

    def _do(self, worker: Worker, which: str, ticket: Ticket) -> None:
        if worker.info.get("parks"):
            worker.send(which)
            return
        mb = max(ticket.seen.gpu_mb, ticket.need.gpu_mb)
        self._gateway.supervisor.spawn_task(self._by_driver(worker, which, mb), f"{which} {worker.component}")

    async def _by_driver(self, worker: Worker, which: str, mb: float) -> None:
        if worker.process is None:
            return
        began = asyncio.get_running_loop().time()
        wrong = await self._helpers.ask(which, worker.process.pid, 30.0 + mb / _SLOWEST)
        seconds = asyncio.get_running_loop().time() - began
        if wrong is not None:
            self.failed(worker, which, wrong)
        elif which == "park":
            self.parked(worker, seconds)
        else:
            self.woken(worker, seconds)

    def parked(self, worker: Worker, seconds: float) -> None:
        """Its device memory is free."""
        ticket = worker.ticket
        if self.states.get(worker) != "parking" or ticket is None:
            return
        self.rates.saw("park", ticket.seen.gpu_mb, seconds)
        self.states[worker] = "parked"
        ticket.parked()
        self._ends[worker] = asyncio.get_running_loop().call_later(self._expires, self.end, worker)
        self._gateway.is_parked(worker)
        if worker in self._wanted:
            self.wake(worker)

    # ---- awake

    def wake(self, worker: Worker) -> bool:
        """A call waits for it. False: it is not parked."""
        state = self.states.get(worker)
        if state is None:
            return False
        self._wanted.add(worker)
        if state == "parked" and worker.ticket is not None:
            self.states[worker] = "waking"
            self._forget_end(worker)
            worker.ticket.wake(
                lambda ticket: self._do(worker, "wake", ticket),
                lambda _, why: self.failed(worker, "wake", why),
            )
        return True

    def woken(self, worker: Worker, seconds: float) -> None:
        """It serves again."""
        if self.states.get(worker) != "waking":
            return
        if worker.ticket is not None:
            self.rates.saw("wake", worker.ticket.need.gpu_mb, seconds)
        log.info("%s is awake after %.2f s", worker.component, seconds)
        self._forget(worker)
        self._gateway.is_awake(worker)

    # ---- trouble

    def failed(self, worker: Worker, which: str, why: str) -> None:
        """It runs on when it could not be parked, and then it ends in order; in the other case it is replaced."""
        if worker not in self.states:
            return
        log.warning("%s could not %s: %s", worker.component, which, why)
        wanted = worker in self._wanted
        self._forget(worker)
        if which == "wake":
            self._gateway.supervisor.kill(worker, "not-woken", on_purpose=True)
        elif wanted:
            self._gateway.is_awake(worker)
        else:
            self._gateway.end(worker)

    def end(self, worker: Worker) -> None:
        """Nobody needs it any more, or the host needs its memory. It cannot end in order: a locked driver answers nothing."""
        if self.states.get(worker) != "parked":
            return
        self._forget(worker)
        self._gateway.supervisor.stop_slot(worker.slot)
        self._gateway.supervisor.kill(worker, "parked", on_purpose=True)

    def evict(self, worker: Worker, short_of: str) -> bool:
        """Others need memory. Whether the worker is one of ours: then it is seen to."""
        state = self.states.get(worker)
        if state == "parked" and short_of == HOST:
            self.end(worker)
        elif state is not None and worker.ticket is not None and not (state == "parking" and short_of != HOST):
            worker.ticket.kept()
        return state is not None

    def gone(self, worker: Worker) -> None:
        """It has ended."""
        self._forget(worker)

    def _forget(self, worker: Worker) -> None:
        self.states.pop(worker, None)
        self._wanted.discard(worker)
        self._forget_end(worker)

    def _forget_end(self, worker: Worker) -> None:
        if handle := self._ends.pop(worker, None):
            handle.cancel()
