"""What workers needed in earlier runs, as the ledger knows it: read from the store once, and written there with each run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from ostler.errors import StoreBusy
from ostler.lifecycle.admission import NONE, Need, footprint
from ostler.lifecycle.ticket import Demand
from ostler.store import now_ms
from ostler.store.footprints import Kind
from ostler.store.lanes import Lane
from ostler.store.store import Store

CPU = "cpu"
"""The device of workers on a node without a GPU."""
_FORGET = 180 * 86_400_000  # milliseconds after which a footprint that nobody measured is forgotten


class Peaks:
    """Peaks by kind and name of device. Without a lane they last as long as the node."""

    def __init__(self, lane: Lane | None = None) -> None:
        self._lane = lane
        self._known: dict[tuple[Kind, str], tuple[Need, int | None]] = {}

    async def load(self) -> None:
        """Read what earlier runs needed. A store that does not answer delays nothing: then what was declared counts."""

        def read(store: Store) -> None:
            store.footprints.prune(now_ms() - _FORGET)
            for row in store.footprints.all():
                kind = Kind(row["task"], row["model"], row["env"])
                self._known[kind, row["device"]] = Need(row["host_mb"], row["gpu_mb"]), row["load_ms"]

        if self._lane is not None:
            with contextlib.suppress(StoreBusy):
                await self._lane.call(read, patience=5.0)

    def known(self, kind: Kind | None, devices: Iterable[str]) -> Need | None:
        """The largest peaks of that kind on these devices."""
        found = [self._known[kind, name][0] for name in devices if kind and (kind, name) in self._known]
        return Need(max(n.host_mb for n in found), max(n.gpu_mb for n in found)) if kind and found else None

    def reload_seconds(self, kind: Kind, devices: Iterable[str]) -> float | None:
        """How long the last load of that kind took."""
        found = [self._known[kind, name][1] or 0 for name in devices if (kind, name) in self._known]
        return max(found, default=0) / 1000 or None

    def need(self, demand: Demand, devices: Iterable[str]) -> Need:
        """What to reserve for a demand on a node with these devices."""
        known = self.known(demand.kind, devices)
        if demand.declared_only:
            return demand.declared.largest(known or NONE)
        return footprint(known, demand.declared, demand.guess)

    def on_host(self, demand: Demand) -> Need:
        """What to reserve on a node without a GPU: what is meant for the device will be the host's memory there."""
        known, need = self.known(demand.kind, [CPU]), self.need(demand, [CPU])
        return Need(known.host_mb if known and known.host_mb else need.host_mb + need.gpu_mb)

    def record(self, kind: Kind | None, device: str, peak: Need, load_ms: int | None = None) -> None:
        """A run has ended with these peaks; see store/footprints.py for how they are joined with earlier ones."""
        if kind is None or peak == NONE:
            return
        old, took = self._known.get((kind, device), (NONE, None))
        lower = Need(0.75 * old.host_mb + 0.25 * peak.host_mb, 0.75 * old.gpu_mb + 0.25 * peak.gpu_mb)
        self._known[kind, device] = peak.largest(lower), load_ms or took
        if self._lane is not None:
            at = now_ms()
            self._lane.post(lambda store: store.footprints.put(kind, device, peak.host_mb, peak.gpu_mb, load_ms, at))
