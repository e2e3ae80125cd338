"""What operators ask of workers. Each verb notes the wish and wakes the supervisor's loop, which does the rest."""

from __future__ import annotations

from typing import Any

from ostler.errors import BadArguments, Conflict, NotFound, OstlerError
from ostler.lifecycle.pauses import NO_PAUSE, PLANE
from ostler.lifecycle.state import Status
from ostler.lifecycle.supervisor import Supervisor
from ostler.lifecycle.worker import Pool, Slot

VERBS = ("drain", "restart", "reset", "kill")
"""What can be asked of one worker."""
ALL = "*"
"""The target of a wish that means all pools."""


class Control:
    """pause, resume, drain, restart, reset, kill."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def slot(self, component: str) -> Slot:
        """The slot of that name; raises NotFound with the names that exist."""
        if found := self._supervisor.slots.get(component):
            return found
        known = ", ".join(self._supervisor.slots) or "none"
        raise NotFound(f"there is no worker {component!r} on node {self._supervisor.node}; known: {known}")

    def pool(self, name: str) -> Pool:
        """The pool of that name; raises NotFound."""
        if found := self._supervisor.pools.get(name):
            return found
        known = ", ".join(self._supervisor.pools) or "none"
        raise NotFound(f"there is no pool {name!r} on node {self._supervisor.node}; known: {known}")

    def drain(self, component: str) -> Status:
        """Finish what it has, then exit and stay stopped until `restart` or `resume`."""
        slot = self.slot(component)
        if slot.status is Status.FAILED or (slot.status is Status.STOPPED and not slot.wanted):
            raise Conflict(f"{component} is {slot.status}; only a running worker can be drained")
        if slot.pool.spec.tenant.kind == PLANE:  # nobody could reach the node any more, not even to start it again
            raise Conflict(
                f"{component} takes the connections of the node's clients, and cannot be drained; restart it"
            )
        slot.wanted = False
        if slot.status is Status.CRASHED:
            self._supervisor.give_up_waiting(slot)
        for worker in slot.all():
            self._supervisor.leave(worker)
        return slot.status

    def restart(self, component: str) -> Status:
        """Reset, then start; a running worker finishes what it has first. Where its pool warms replacements, the new one is ready
        before the old one leaves.
        """
        slot = self.slot(component)
        self._supervisor.forget(slot)
        slot.wanted, slot.resting, slot.ask_again = True, False, 0.0
        worker = slot.worker
        if worker is not None and worker.status is Status.HEALTHY and slot.pool.spec.recycle.warm and not worker.leave:
            slot.spare_recycle_until = 0.0
            worker.tired = "restarted by an operator"
        elif worker is not None:
            self._supervisor.leave(worker)
        self._supervisor.wake()
        return slot.status

    def reset(self, component: str) -> Status:
        """Forget the crashes. A failed or crashed worker becomes stopped, and stays so until `restart` or `resume`."""
        slot = self.slot(component)
        if slot.worker is None and slot.rest in (Status.FAILED, Status.CRASHED):
            slot.wanted = False
        self._supervisor.forget(slot)
        return slot.status

    def kill(self, component: str) -> Status:
        """SIGKILL it now. It is started again at once; this counts neither against the worker nor against what it had in hand."""
        slot = self.slot(component)
        if not slot.all():
            raise Conflict(f"{component} is {slot.status}; there is no process to kill")
        for worker in slot.all():
            self._supervisor.kill(worker, "killed", on_purpose=True)
        return slot.status

    async def pause(self, pool: str | None) -> None:
        """The workers of the pool (None: all) stay alive, finish what they have, and take nothing new."""
        found = self._supervisor.pools.get(pool) if pool else None
        if found is not None and found.spec.tenant.kind == PLANE:
            raise Conflict(NO_PAUSE)
        await self._supervisor.pauses.set(pool, paused=True)

    async def resume(self, pool: str | None) -> None:
        """They take work again. Stopped ones are started, failed ones never. Twice is the same as once."""
        await self._supervisor.pauses.set(pool, paused=False)
        self.start_stopped(pool)

    def start_stopped(self, pool: str | None) -> None:
        """Start the stopped workers of a pool of this node (None: all); of a pool that it has not, none."""
        for slot in self._supervisor.slots.values():
            if pool in (None, slot.pool.spec.name):
                slot.wanted |= slot.key is None  # what was opened on demand is its tenant's to start
                slot.resting, slot.ask_again = False, 0.0
        self._supervisor.wake()

    def ask(self, component: str, verb: str) -> Status:
        """One of VERBS, on a worker of this node."""
        if verb not in VERBS:
            raise BadArguments(f"{verb!r} is not something that a worker can do; known: {', '.join(VERBS)}")
        return Status(getattr(self, verb)(component))

    def grant(self, verb: str, target: str) -> dict[str, Any]:
        """Do what an operator asked of this node through the store; the answer."""
        try:
            if verb == "resume":
                self.start_stopped(None if target == ALL else target)
                return {"status": None}
            return {"status": str(self.ask(target, verb))}
        except OstlerError as error:
            return {"error": {"status": error.status, "code": error.code, "message": str(error)}}
