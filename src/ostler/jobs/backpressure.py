"""When claiming pauses because the machine cannot keep up (seed 002, R4). Pure."""

from __future__ import annotations


def reason(depth: int, load: float, *, high_watermark: int, load_threshold: float) -> str | None:
    """Why to pause, or None. Both must be above: a long queue on an idle machine is no reason, nor is a busy machine without one."""
    if depth > high_watermark and load > load_threshold:
        return f"more than {high_watermark} jobs wait and the load per core is {load:.2f}, above {load_threshold:g}"
    return None
