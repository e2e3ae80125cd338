"""What the supervisor writes down: health rows, exits, beats. It never waits for the store; a lane writes in order.

The decisions are made from memory, so a locked database delays the record and never a restart.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from ostler.config import Settings
from ostler.errors import ConfigError, NodeLost, StoreBusy
from ostler.lifecycle.membership import Membership
from ostler.lifecycle.restart import History
from ostler.lifecycle.state import Status
from ostler.lifecycle.worker import Slot, Worker
from ostler.store import now_ms
from ostler.store.lanes import Lane
from ostler.store.rows import ExitRow
from ostler.store.store import Store

log = logging.getLogger("ostler.lifecycle")

_DEGRADED = 4  # "more than three in a row"


class Records:
    """The node's own part of the health table."""

    def __init__(self, settings: Settings, lane: Lane, member: Membership, lost: Callable[[str], None]) -> None:
        self._settings, self._lane, self._member, self._lost = settings, lane, member, lost
        self._writing_beats = False
        self._late_beats = 0  # heartbeats in a row that the store has not taken

    # ---- the node

    async def load(
        self, slots: dict[str, Slot], known_slot: Callable[[str, int, str], Slot | None]
    ) -> tuple[bool, frozenset[str]]:
        """Register the slots, and fill in what is known of them. Returns (enabled, paused pools).

        `known_slot(pool, number, key)` makes the slot of a row that was opened on demand, or says that it is no more.
        """
        patience = self._settings.store_patience
        return await self._lane.call(lambda store: self._load(store, slots, known_slot), patience=patience)

    def _load(
        self, store: Store, slots: dict[str, Slot], known_slot: Callable[[str, int, str], Slot | None]
    ) -> tuple[bool, frozenset[str]]:
        now, health = now_ms(), store.health
        known = {w["component"]: w for w in health.get_all_workers(self._node)}
        for gone in known.keys() - slots.keys():
            number, key = int(gone.rpartition(":")[2]), known[gone]["key"]
            if key is None or known_slot(known[gone]["pool"], number, key) is None:
                health.remove(self._node, gone)
        for slot in slots.values():
            health.register(self._node, slot.component, slot.pool.spec.name, now, slot.key)
            if found := known.get(slot.component):
                slot.generation = slot.recorded = found["generation"]
                slot.history = self._history(store, slot.component, now, found["streak"], found["restart_count"])
                if found["status"] == Status.FAILED:
                    slot.rest = Status.FAILED
                for row in health.exits(self._node, slot.component, 1):
                    slot.last_exit = ExitRow(component=slot.component, **row)
        health.prune(now - int(self._settings.exit_retention * 1000))
        return store.meta.pauses()

    def _history(self, store: Store, component: str, now: int, streak: int, lifetime: int) -> History:
        exits = store.health.counted_exits(self._node, component, now - int(self._settings.restart_window * 1000))
        crashes = tuple(at for at, kind in exits if kind == "crash")
        return History(crashes, tuple(at for at, kind in exits if kind == "clean"), streak, lifetime)

    @property
    def _node(self) -> str:
        return self._member.id

    def node_moved(self, status: Status) -> None:
        self._post(lambda store: store.nodes.mark(self._node, status))

    # ---- workers

    def opened(self, slot: Slot) -> None:
        """A slot was opened on demand: its number stays with its key."""
        pool, at = slot.pool.spec.name, now_ms()
        self._post(lambda store: store.health.register(self._node, slot.component, pool, at, slot.key))

    def starting(self, worker: Worker) -> None:
        process, at = worker.process, now_ms()
        pid, started = (process.pid, process.started) if process else (None, None)
        component, generation, metadata = worker.component, worker.generation, worker.metadata
        worker.slot.recorded = generation
        self._post(
            lambda store: store.health.mark_starting(self._node, component, generation, pid, started, at, metadata)
        )

    def moved(self, worker: Worker) -> None:
        self._mark(worker.component, worker.generation, worker.status)

    def stopped(self, row: ExitRow, code: int | None) -> None:
        self._post(lambda store: store.health.mark_stopped(self._node, row, code))

    def waits(self, slot: Slot) -> None:
        """A stopped slot waits for memory, or does so no more."""
        component, generation, why = slot.component, slot.recorded, slot.waiting
        self._post(lambda store: store.health.mark_waiting(self._node, component, generation, why))

    def stopped_waiting(self, slot: Slot) -> None:
        """A crashed slot will not be started again."""
        self._mark(slot.component, slot.recorded, Status.STOPPED)

    def crashed(self, row: ExitRow, code: int | None) -> None:
        self._post(lambda store: store.health.mark_crashed(self._node, row, code))

    def side_end(self, row: ExitRow) -> None:
        """The end of a worker that was not the slot's own: in the history, not in the row."""
        self._post(lambda store: store.health.add_exit(self._node, row))

    def failed(self, slot: Slot) -> None:
        self._mark(slot.component, slot.recorded, Status.FAILED)

    def settled(self, worker: Worker) -> None:
        component, generation = worker.component, worker.generation
        self._post(lambda store: store.health.end_streak(self._node, component, generation))

    def forgiven(self, worker: Worker) -> None:
        """It finished an item: streak and window start anew."""
        component, generation = worker.component, worker.generation
        self._post(lambda store: store.health.forgive(self._node, component, generation))

    def reset(self, slot: Slot) -> None:
        self._post(lambda store: store.health.reset_restart_count(self._node, slot.component))

    def beats(self, workers: list[Worker]) -> None:
        """All heartbeats of the node in one statement; while one is on its way to the store, the next is only counted as late."""
        if self._writing_beats:
            self._missed()
            return
        if self._member.lost:
            return
        beats: list[tuple[str, int, int, float | None]]
        beats = [(w.component, w.generation, w.last_beat_ms, w.rss_mb) for w in workers]
        self._writing_beats = True
        node = self._node
        self._post(lambda store: self._write_beats(store, node, beats))

    def _write_beats(self, store: Store, node: str, beats: list[tuple[str, int, int, float | None]]) -> None:
        """On the lane. Whatever goes wrong with one write, the next heartbeat is written again."""
        try:
            at = store.nodes.beat(node)
            if beats:
                store.health.update_heartbeats(node, beats)
        except (StoreBusy, ConfigError):
            raise  # the lane tries this one again
        except NodeLost:
            self._writing_beats = False
            self._lost(node)
            return
        except Exception:
            self._writing_beats = False
            self._missed()
            raise
        if self._late_beats >= _DEGRADED:
            log.info("the store accepts heartbeats again")
        self._member.took_beat(at)
        self._late_beats, self._writing_beats = 0, False

    def _missed(self) -> None:
        self._late_beats += 1
        if self._late_beats == _DEGRADED:
            log.warning(
                "HEARTBEAT_DEGRADED: the store has not accepted %d heartbeats in a row; workers continue",
                self._late_beats,
            )

    @property
    def degraded(self) -> bool:
        """Whether more than three heartbeats in a row could not be written."""
        return self._late_beats >= _DEGRADED

    def _mark(self, component: str, generation: int, status: Status) -> None:
        at = now_ms()
        self._post(lambda store: store.health.mark(self._node, component, generation, status, at))

    def _post(self, work: Callable[[Store], object]) -> None:
        self._lane.post(work)
