"""What memory there is: GPUs by NVML (nvidia-ml-py), else by nvidia-smi; the host's from /proc and its cgroup.

All reading blocks and is for a thread. MB are millions of bytes. A GPU's live free memory is what counts; what each process uses
is known only where the driver tells (in containers it often does not).

`OSTLER_FAKE_GPUS` names a JSON file that stands for the GPUs, and is read anew at every look:

    {"gpus": [{"uuid": "GPU-0", "name": "Fake", "total_mb": 1000, "used_mb": 50, "pids": {"1234": 400}}],
     "folder": "used", "host": {"total_mb": 8000, "used_mb": 1000}}

Only `gpus` with `total_mb` is needed. In `folder` (beside the file) a file `UUID.PID` holds the MB of a process. The memory of a
process that has ended is free.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ostler.lifecycle.admission import HOST

FAKE = "OSTLER_FAKE_GPUS"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_SMI_SECONDS = 5.0  # nvidia-smi that has not answered by then is given up
_MIB = 1.048576
_UNLIMITED = 1 << 60  # bytes; cgroups of version 1 say "no limit" with a number near 2^63


class Unreadable(Exception):
    """The GPUs cannot be read now."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU; or, with the uuid `host`, the host."""

    uuid: str
    index: int
    name: str
    total_mb: float


@dataclass(frozen=True, slots=True)
class Reading:
    """What a device has now. `per_pid`: MB by process; None where the driver does not tell."""

    device: Device
    free_mb: float
    per_pid: dict[int, float] | None = None


class Source(Protocol):
    """One way to read the GPUs."""

    def read(self) -> list[Reading]:
        """All GPUs; raises Unreadable."""


class Devices:
    """The GPUs that this node may use, and the host's memory."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._fake = Path(environ[FAKE]) if environ.get(FAKE) else None
        self._visible = environ.get(VISIBLE)
        self._source: Source | None = None

    def read(self) -> list[Reading]:
        """The GPUs now, in order of their index; none where there are none. Raises Unreadable."""
        if self._source is None:
            self._source = Fake(self._fake) if self._fake else _found()
        return [r for r in self._source.read() if _is_visible(r.device, self._visible)]

    def host(self) -> Reading:
        """The host's memory now: the smaller of what the machine has and what the cgroup still allows."""
        if self._fake is not None and (host := Fake(self._fake).host()):
            return host
        total, free = host_memory()
        return Reading(Device(HOST, -1, HOST, total), free)


def _found() -> Source:
    with contextlib.suppress(ImportError, Unreadable):
        return Nvml()
    return Smi() if shutil.which("nvidia-smi") else Nothing()


def _is_visible(device: Device, visible: str | None) -> bool:
    """CUDA_VISIBLE_DEVICES names indices or beginnings of UUIDs; unset means all."""
    if visible is None:
        return True
    names = [name.strip() for name in visible.split(",")]
    return any(name == str(device.index) or (name and device.uuid.startswith(name)) for name in names)


class Nothing:
    """No GPU."""

    def read(self) -> list[Reading]:
        return []


class Nvml:
    """The driver's own library."""

    def __init__(self) -> None:
        import pynvml  # type: ignore[import-not-found,unused-ignore]  # noqa: PLC0415  an extra: `pip install ostler[gpu]`

        self._nvml: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise Unreadable(f"NVML: {error}") from error

    def read(self) -> list[Reading]:
        nvml = self._nvml
        try:
            return [self._one(n) for n in range(nvml.nvmlDeviceGetCount())]
        except nvml.NVMLError as error:
            raise Unreadable(f"NVML: {error}") from error

    def _one(self, index: int) -> Reading:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        uuid, name = (_text(read(handle)) for read in (nvml.nvmlDeviceGetUUID, nvml.nvmlDeviceGetName))
        per_pid: dict[int, float] | None = {}
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if not process.usedGpuMemory:  # None, or a 0 that cannot be true
                per_pid = None
                break
            assert per_pid is not None
            per_pid[process.pid] = per_pid.get(process.pid, 0.0) + process.usedGpuMemory / 1e6
        return Reading(Device(uuid, index, name, memory.total / 1e6), memory.free / 1e6, per_pid)


def _text(found: str | bytes) -> str:
    return found.decode() if isinstance(found, bytes) else found


class Smi:
    """The program that comes with the driver: slower, and there where the library's package is not."""

    def __init__(self, program: str = "nvidia-smi") -> None:
        self._program = program

    def read(self) -> list[Reading]:
        used: dict[str, dict[int, float]] = {}
        told = True
        for pid, mb, uuid in self._ask("--query-compute-apps=pid,used_memory,gpu_uuid", 3):
            try:
                used.setdefault(uuid, {})[int(pid)] = float(mb) * _MIB
            except ValueError:  # [N/A]
                told = False
        found = []
        for uuid, index, name, total, free in self._ask("--query-gpu=uuid,index,name,memory.total,memory.free", 5):
            try:
                device = Device(uuid, int(index), name, float(total) * _MIB)
                found.append(Reading(device, float(free) * _MIB, used.get(uuid, {}) if told else None))
            except ValueError as error:
                raise Unreadable(f"{self._program} does not tell the memory of {name}: {total}, {free}") from error
        return found

    def _ask(self, query: str, columns: int) -> Iterator[list[str]]:
        argv = [self._program, query, "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_SMI_SECONDS, check=True)
        except subprocess.TimeoutExpired as error:
            raise Unreadable(f"{self._program} did not answer within {_SMI_SECONDS:g} s") from error
        except subprocess.CalledProcessError as error:
            said = (error.stdout + error.stderr).strip().partition("\n")[0]
            if "No devices" in said:
                return
            raise Unreadable(f"{self._program} exited with code {error.returncode}: {said}") from error
        except OSError as error:
            raise Unreadable(f"{self._program}: {error.strerror}") from error
        for line in done.stdout.splitlines():
            cells = [cell.strip() for cell in line.split(",")]
            if len(cells) == columns:
                yield cells


class Fake:
    """GPUs that a file describes, for tests."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> list[Reading]:
        table = self._table()
        return [self._one(n, gpu, table.get("folder")) for n, gpu in enumerate(table.get("gpus", []))]

    def host(self) -> Reading | None:
        """The host's memory, where the file says something of it."""
        host = self._table().get("host")
        if host is None:
            return None
        total = float(host["total_mb"])
        return Reading(Device(HOST, -1, HOST, total), total - float(host.get("used_mb", 0.0)))

    def _table(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise Unreadable(f"{self._path}: {error}") from error
        return found

    def _one(self, index: int, gpu: Mapping[str, Any], folder: str | None) -> Reading:
        uuid, total = gpu.get("uuid", f"GPU-fake-{index}"), float(gpu["total_mb"])
        used = {int(pid): float(mb) for pid, mb in gpu.get("pids", {}).items()}
        for path in (self._path.parent / folder).glob(f"{uuid}.*") if folder else ():
            with contextlib.suppress(OSError, ValueError):
                used[int(path.suffix[1:])] = float(path.read_text())
        used = {pid: mb for pid, mb in used.items() if _lives(pid)}
        free = total - float(gpu.get("used_mb", 0.0)) - sum(used.values())
        return Reading(Device(uuid, index, gpu.get("name", "Fake GPU"), total), free, used)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="latin-1").rpartition(")")[2].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


# ---- the host


def host_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> tuple[float, float]:
    """(total, available) memory of the host in MB, as far as this process's cgroup allows it."""
    lines = (line.split() for line in (proc / "meminfo").read_text(encoding="ascii").splitlines())
    known = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1}
    total, free = known["MemTotal:"], known.get("MemAvailable:", known["MemFree:"])
    for most, left in _limits(proc, cgroups):
        total, free = min(total, most), min(free, left)
    return total / 1e6, max(0, free) / 1e6


def _limits(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """(limit, what is left of it) of each cgroup that this process is in, its parents included."""
    with contextlib.suppress(OSError):
        for line in (proc / "self" / "cgroup").read_text(encoding="ascii").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                names = ("memory.max", "memory.current", "inactive_file")
                yield from _walk(cgroups, path, names)
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                yield from _walk(cgroups / "memory", path, names)


def _walk(root: Path, path: str, names: tuple[str, str, str]) -> Iterator[tuple[int, int]]:
    """From the root to the process's own cgroup; a container may see its own as the root."""
    limit, usage, inactive = names
    at = root
    for part in ["", *path.strip("/").split("/")]:
        at = at / part if part else at
        with contextlib.suppress(OSError, ValueError):
            most = int((at / limit).read_text(encoding="ascii"))  # "max" is no limit
            if most < _UNLIMITED:
                used = int((at / usage).read_text(encoding="ascii"))
                yield most, most - used + _field(at / "memory.stat", inactive)


def _field(path: Path, name: str) -> int:
    """What the kernel would give back at once: file pages that nobody uses."""
    with contextlib.suppress(OSError):
        for line in path.read_text(encoding="ascii").splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0
