"""What memory there is: GPUs by each of the ways, and the host's with and without a cgroup."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ostler.lifecycle import devices
from ostler.lifecycle.devices import Device, Devices, Nvml, Smi, Unreadable, host_memory

MEMINFO = "MemTotal:       16000000 kB\nMemFree:  1000000 kB\nMemAvailable:   10000000 kB\n"


def fake(tmp_path: Path, table: object, **environ: str) -> Devices:
    path = tmp_path / "gpus.json"
    path.write_text(json.dumps(table))
    return Devices({"OSTLER_FAKE_GPUS": str(path), **environ})


# ---- the fake


def test_a_fake_gpu_is_read_anew_and_the_memory_of_dead_processes_is_free(tmp_path: Path) -> None:
    program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    gpu = {"uuid": "GPU-a", "total_mb": 1000, "used_mb": 50, "pids": {str(os.getpid()): 100}}
    found = fake(tmp_path, {"gpus": [gpu], "folder": "used"})
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / f"GPU-a.{program.pid}").write_text("400")
    (reading,) = found.read()
    assert (reading.free_mb, reading.per_pid) == (450, {os.getpid(): 100, program.pid: 400})
    program.kill()
    program.wait()
    program.stdin.close()
    assert found.read()[0].free_mb == 850
    assert reading.device == Device("GPU-a", 0, "Fake GPU", 1000)


def test_a_fake_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="nowhere"):
        Devices({"OSTLER_FAKE_GPUS": str(tmp_path / "nowhere")}).read()


@pytest.mark.parametrize(
    ("visible", "seen"), [("0", [0]), ("GPU-b,0", [0, 1]), ("GPU-bb", [1]), ("", []), ("-1", []), (" 1 ", [1])]
)
def test_only_the_gpus_that_cuda_would_see_are_counted(tmp_path: Path, visible: str, seen: list[int]) -> None:
    gpus = [{"uuid": "GPU-aa", "total_mb": 1}, {"uuid": "GPU-bb", "total_mb": 1}]
    found = fake(tmp_path, {"gpus": gpus}, CUDA_VISIBLE_DEVICES=visible)
    assert [r.device.index for r in found.read()] == seen


# ---- nvidia-smi


def smi(tmp_path: Path, script: str) -> Smi:
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return Smi(str(path))


ANSWER = """case "$1" in
  --query-gpu*) echo "GPU-x, 0, NVIDIA H200, 143771, 100000";;
  *) echo "77, {used}, GPU-x";;
esac"""


def test_nvidia_smi_tells_mebibytes_and_we_count_megabytes(tmp_path: Path) -> None:
    (reading,) = smi(tmp_path, ANSWER.replace("{used}", "1000")).read()
    assert reading.device == Device("GPU-x", 0, "NVIDIA H200", pytest.approx(150_754, abs=1))
    assert (reading.free_mb, reading.per_pid) == (pytest.approx(104_857.6), {77: pytest.approx(1048.576)})


def test_processes_of_which_nvidia_smi_tells_nothing_are_unknown_and_not_zero(tmp_path: Path) -> None:
    assert smi(tmp_path, ANSWER.replace("{used}", "[N/A]")).read()[0].per_pid is None


def test_an_nvidia_smi_that_fails_or_hangs_is_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unreadable, match="code 9: Failed to initialize NVML"):
        smi(tmp_path, "echo 'Failed to initialize NVML'; exit 9").read()
    assert smi(tmp_path, "echo 'No devices were found'; exit 6").read() == []
    monkeypatch.setattr(devices, "_SMI_SECONDS", 0.1)
    with pytest.raises(Unreadable, match="did not answer"):
        smi(tmp_path, "exec sleep 60").read()
    with pytest.raises(Unreadable):
        Smi(str(tmp_path / "missing")).read()


# ---- NVML


class NVMLError(Exception):
    pass


def nvml(processes: list[tuple[int, int | None]], **more) -> SimpleNamespace:
    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda n: n,
        nvmlDeviceGetMemoryInfo=lambda h: SimpleNamespace(total=80_000_000_000, free=30_000_000_000),
        nvmlDeviceGetUUID=lambda h: b"GPU-y",
        nvmlDeviceGetName=lambda h: "NVIDIA L4",
        nvmlDeviceGetComputeRunningProcesses=lambda h: [
            SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes
        ],
        **more,
    )


def test_nvml_is_read_where_its_package_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml([(5, 2_000_000_000)]))
    (reading,) = Nvml().read()
    assert reading == devices.Reading(Device("GPU-y", 0, "NVIDIA L4", 80_000), 30_000, {5: 2000})
    monkeypatch.setitem(sys.modules, "pynvml", nvml([(5, 2_000_000_000), (6, None)]))
    assert Devices({}).read()[0].per_pid is None


def test_an_nvml_that_fails_is_unreadable_and_at_first_gives_way_to_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NVMLError("Driver/library version mismatch")

    broken = nvml([])
    monkeypatch.setitem(sys.modules, "pynvml", broken)
    source = Nvml()
    broken.nvmlDeviceGetMemoryInfo = fail
    with pytest.raises(Unreadable, match="version mismatch"):
        source.read()
    broken.nvmlInit = fail
    monkeypatch.setattr(devices.shutil, "which", lambda name: None)
    assert Devices({}).read() == []


# ---- the host


def machine(tmp_path: Path, cgroup: str, files: dict[str, str]) -> tuple[float, float]:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(MEMINFO)
    (tmp_path / "proc" / "self" / "cgroup").write_text(cgroup)
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return host_memory(tmp_path / "proc", tmp_path / "cgroup")


def test_without_a_limit_the_machines_available_memory_counts(tmp_path: Path) -> None:
    files = {"memory.max": "max\n", "memory.current": "7\n"}
    assert machine(tmp_path, "0::/\n", files) == (16_384, 10_240)


def test_the_tightest_cgroup_counts_and_file_pages_that_nobody_uses_are_free(tmp_path: Path) -> None:
    files = {
        "a/memory.max": "8000000000\n",
        "a/memory.current": "1000000000\n",
        "a/b/memory.max": "4000000000\n",
        "a/b/memory.current": "3000000000\n",
        "a/b/memory.stat": "anon 5\ninactive_file 500000000\n",
    }
    assert machine(tmp_path, "0::/a/b\n", files) == (4000, 1500)


def test_cgroups_of_version_1_count_too(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "1\n",
        "memory/box/memory.limit_in_bytes": "2000000000\n",
        "memory/box/memory.usage_in_bytes": "500000000\n",
        "memory/box/memory.stat": "total_inactive_file 100000000\n",
    }
    assert machine(tmp_path, "4:memory:/box\n0::/\n", files) == (2000, 1600)


def test_this_machine_can_be_read() -> None:
    total, free = host_memory()
    assert 0 < free <= total
