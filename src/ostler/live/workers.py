"""The workers of all nodes, and the nodes: those of this node from memory, the others as the store has them."""

from __future__ import annotations

from typing import Any

from ostler.lifecycle.supervisor import Supervisor
from ostler.live import states
from ostler.live.broker import Broker
from ostler.store.fleet import Fleet


class Workers:
    """Workers and nodes as the broker has them."""

    def __init__(self, broker: Broker, supervisor: Supervisor) -> None:
        self._broker, self._supervisor = broker, supervisor
        self.memory: dict[str, float] = {}  # of this node's workers as it is shown, in MB by component
        self._told: dict[str, dict[str, Any]] = {}  # workers and nodes that the broker has, by key: their last state
        self._gone: set[tuple[str, str]] = set()  # … whose end was told; forgotten at the next look

    def tell(self, fleet: Fleet | None) -> None:
        """Workers of this node from memory, those of others from the store, and the nodes."""
        supervisor = self._supervisor
        own, told = supervisor.member.id, dict[str, dict[str, Any]]()
        label = (fleet and fleet.label(own)) or supervisor.node
        naming = states.Naming(own, label, bool(fleet and fleet.several))
        for slot in supervisor.slots.values():
            doing = slot.pool.spec.tenant.doing(slot.worker) if slot.worker else None
            paused = supervisor.pauses.holds(slot.pool.spec.name)
            state = states.worker(slot, naming, self._memory(slot), doing, paused=paused)
            self._publish(told, state)
        for row in fleet.workers if fleet else ():
            if row["node_id"] != own:
                self._publish(told, states.far_worker(row, paused=supervisor.pauses.holds(row["pool"])))
        for node in fleet.nodes if fleet else ():
            told[node["id"]] = state = states.node(node)
            self._broker.publish("system:nodes", "node_update", "node", state, key=node["id"])
        self._forget_gone(told)

    def _publish(self, told: dict[str, dict[str, Any]], state: dict[str, Any]) -> None:
        key = f"{state['node_id']}/{state['component']}"
        told[key] = state
        self._broker.publish(f"{state['component']}:status", "worker_update", "worker", state, key=key)

    def _forget_gone(self, told: dict[str, dict[str, Any]]) -> None:
        """Nodes that have left, and their workers: say so once, and forget them a look later."""
        for topic, key in self._gone:
            if key not in told:
                self._broker.forget(topic, key)
        self._gone.clear()
        for key, state in self._told.items():
            if key not in told:
                kind, topic = (
                    ("worker", f"{state['component']}:status") if "component" in state else ("node", "system:nodes")
                )
                last = {**state, "status": "stopped", "gone": True}
                self._broker.publish(topic, f"{kind}_update", kind, last, key=key)
                self._gone.add((topic, key))
        self._told = told

    def _memory(self, slot: Any) -> float | None:
        """The worker's memory; a little more or less is no news."""
        now = slot.worker.rss_mb if slot.worker else None
        if now is None:
            self.memory.pop(slot.component, None)
            return None
        shown = self.memory.get(slot.component)
        if shown is None or abs(now - shown) > max(2.0, 0.05 * shown):
            self.memory[slot.component] = shown = round(now, 1)
        return shown
