"""What tickets and readings come to: memories and residents as admission sees them, and as people do. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ostler.lifecycle.admission import HOST, Memory, Need, Resident
from ostler.lifecycle.readings import GpuReadings, HostReading
from ostler.lifecycle.ticket import Standing, Ticket


def memories(host: HostReading, gpus: GpuReadings | None, held: Collection[Ticket], headroom: Need) -> list[Memory]:
    """The host, then the GPUs. Reserved is what each holder may still take: its need less what is seen of it."""
    device, free = host.reading.device, host.reading.free_mb
    found = [Memory(HOST, device.total_mb, free, _reserved(HOST, held), headroom.host_mb)]
    for uuid, reading in (gpus.readings if gpus else {}).items():
        total, reserved = reading.device.total_mb, _reserved(uuid, held)
        found.append(Memory(uuid, total, reading.free_mb, reserved, headroom.gpu_mb))
    return found


def _reserved(name: str, held: Collection[Ticket]) -> float:
    return sum(max(0.0, need - seen) for seen, need in (_share(ticket, name) for ticket in held))


def _share(ticket: Ticket, name: str) -> tuple[float, float]:
    """(MB seen, MB reserved) of a ticket in that memory. What is parked is on the host alone."""
    if name == HOST:
        return ticket.seen.host_mb, ticket.need.host_mb
    if ticket.device != name or ticket.status == "parked":
        return 0.0, 0.0
    return ticket.seen.gpu_mb, ticket.need.gpu_mb


def resident(ticket: Ticket, standing: Standing) -> Resident:
    """The holder of a ticket, with what its going would bring."""
    most = ticket.need.largest(ticket.seen)
    return Resident(
        ticket.key,
        ticket.device,
        most.host_mb,
        most.gpu_mb if ticket.device else 0.0,
        busy=standing.busy,
        pinned=standing.pinned,
        parked=ticket.status == "parked",
        leaving=ticket.claimed,
        yields=standing.yields,
        reload_s=standing.reload_s,
        use=standing.use,
        group=ticket.demand.group,
    )


def on_device(ticket: Ticket, found: GpuReadings) -> float:
    """MB of device memory that its worker uses, as a reading tells."""
    session = ticket.session or -1
    if ticket.status == "parked":
        return 0.0
    if ticket.device is None:  # nothing was reserved; if it uses one all the same, the next of its kind reserves that
        return sum((told or {}).get(session, 0.0) for told in found.sessions.values())
    return (found.sessions.get(ticket.device) or {}).get(session, 0.0) or ticket.reported.gpu_mb


def waiting(ticket: Ticket, need: Need, now: float) -> dict[str, Any]:
    """One that waits, for health, metrics and dashboard."""
    memory = {"host_mb": round(need.host_mb), "gpu_mb": round(need.gpu_mb)}
    return {"owner": ticket.owner, **memory, "seconds": round(now - ticket.since, 1), "reason": ticket.why}


def shown(memory: Memory, gpus: GpuReadings | None, held: Collection[Ticket]) -> dict[str, Any]:
    """One memory for health, metrics and dashboard, with who holds how much of it."""
    reading = gpus.readings.get(memory.name) if gpus else None
    return {
        "uuid": memory.name,
        "index": reading.device.index if reading else None,
        "name": reading.device.name if reading else HOST,
        "total_mb": round(memory.total_mb),
        "free_mb": round(memory.free_mb),
        "reserved_mb": round(memory.reserved_mb),
        "headroom_mb": round(memory.headroom_mb),
        "room_mb": round(max(0.0, memory.room_mb)),
        "owners": [
            {"owner": t.owner, "mb": round(seen), "need_mb": round(need), "status": t.status}
            for t in held
            for seen, need in [_share(t, memory.name)]
            if seen or need
        ],
    }
