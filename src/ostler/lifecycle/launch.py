"""From a pool's spec to a process that can be exec'd: places filled in, environment, mark and log named."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from ostler.lifecycle import family
from ostler.lifecycle.devices import VISIBLE
from ostler.lifecycle.logs import worker_log
from ostler.lifecycle.probe import fill
from ostler.lifecycle.process import Launch
from ostler.lifecycle.worker import PoolSpec, Slot


def places(spec: PoolSpec, slot: Slot, argv: Sequence[str]) -> dict[str, str]:
    """`{n}`, `{port}` and what the pool adds, for one worker; a port is looked for only where one is wanted."""
    wants_port = spec.probe is not None and any("{port}" in part for part in (*argv, *spec.env.values()))
    return {**spec.fills(slot), "n": str(slot.number), "port": str(_free_port()) if wants_port else "0"}


def prepare(
    spec: PoolSpec,
    slot: Slot,
    generation: int,
    argv: Sequence[str],
    filled: dict[str, str],
    token: str,
    data: Path,
    beat: float,
    device: str | None = None,
) -> Launch:
    """The launch of one generation. The node's token is not for jobs: they need only the store. `device`: the GPU on which memory
    is reserved for it, the only one that CUDA shows it.
    """
    inherited = {k: v for k, v in os.environ.items() if k not in (family.NODE, "OSTLER_TOKEN")}
    return Launch(
        argv=list(argv) if spec.probe is None else [fill(a, filled) for a in argv],
        env={
            **inherited,
            **({VISIBLE: device} if device else {}),
            **spec.given,
            **{k: fill(v, filled) for k, v in spec.env.items()},
            "OSTLER_COMPONENT": slot.component,
        },
        mark=f"{token}/{slot.component}/{generation}/",
        log=worker_log(data, spec.name, slot.number),
        cwd=spec.cwd,
        beat=beat if spec.probe is None else None,
        descriptors=spec.descriptors,
        nice=spec.nice,
    )


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
