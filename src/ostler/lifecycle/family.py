"""A worker's family: every process that came out of it, whatever it did to hide. Standard library alone.

Each worker is started with OSTLER_FAMILY=<node token>/<component>/<generation> in its environment, and children inherit
it, also across setsid and double forks. Killing a family takes everything that carries the mark, and the descendants of
those, until a look at /proc finds none.

Run as a program, this file is the node's guard: a tiny process that waits for the node's death (EOF on its standard
input) and then ends all of the node's families, so that a SIGKILL of the node leaves nothing behind, not even programs
that know nothing of Ostler and would never notice.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

VARIABLE = "OSTLER_FAMILY"
NODE = "OSTLER_NODE"  # in the node's own environment: children with this and without the other are the node's own
_OWN = 0.05  # seconds in which workers leave by themselves, and the data plane tells its clients why, before the guard ends them


class Seen(NamedTuple):
    """One line of /proc."""

    pid: int
    parent: int
    session: int
    zombie: bool


def boot_id() -> str:
    """Which boot of this machine, and which pid namespace there: pids and start times mean nothing across two of them.

    Containers on one machine share its boot, and each has a PID 1.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return "unknown"


def _stat(pid: int) -> list[str] | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="latin-1") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def start_time(pid: int) -> int | None:
    """When the process started, in ticks since boot; with the pid it is an identity. None when there is none."""
    fields = _stat(pid)
    return int(fields[19]) if fields else None


def is_alive(pid: int | None, started: int | None) -> bool:
    """Whether this very process (not another one with its pid) runs."""
    if pid is None or started is None:
        return False
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX" and int(fields[19]) == started


def processes() -> Iterator[Seen]:
    """All processes that can be seen; none where there is no /proc."""
    try:
        names = os.listdir("/proc")  # noqa: PTH208  thousands of names, no objects
    except OSError:
        return
    for name in names:
        if name.isdigit() and (fields := _stat(int(name))):
            yield Seen(int(name), int(fields[1]), int(fields[3]), fields[0] in "ZX")


def children() -> list[Seen]:
    """The children of this process, exited ones too. None where there is no /proc."""
    pids: set[int] = set()
    try:
        for thread in os.listdir("/proc/self/task"):  # noqa: PTH208
            with open(f"/proc/self/task/{thread}/children", encoding="ascii") as file:  # noqa: PTH123
                pids.update(map(int, file.read().split()))
    except OSError:  # a kernel without that file, or a thread that has just ended: the slow way
        return [p for p in processes() if p.parent == os.getpid()]
    return [Seen(pid, int(f[1]), int(f[3]), f[0] in "ZX") for pid in pids if (f := _stat(pid))]


def marks_of(pid: int) -> dict[str, str]:
    """What a process carries of OSTLER_FAMILY and OSTLER_NODE in its environment."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            entries = [entry.partition(b"=") for entry in file.read().split(b"\0")]
    except OSError:
        return {}
    wanted = (VARIABLE.encode(), NODE.encode())
    return {name.decode(): value.decode(errors="replace") for name, _, value in entries if name in wanted}


def cpu_seconds() -> float:
    """CPU time of this process and all its descendants, those that have exited and were reaped included."""
    tick = os.sysconf("SC_CLK_TCK")
    parents: dict[int, int] = {}
    used: dict[int, int] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        if name.isdigit() and (fields := _stat(int(name))):
            parents[int(name)] = int(fields[1])
            used[int(name)] = sum(map(int, fields[11:15]))
    return sum(n for pid, n in used.items() if _descends(pid, os.getpid(), parents)) / tick


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    for _ in range(1000):  # a bound for pids that are used again while we look
        if pid == root:
            return True
        if pid not in parents:
            return False
        pid = parents[pid]
    return False


def members(prefix: str, roots: Iterable[int] = ()) -> set[int]:
    """All living processes whose mark starts with `prefix`, the `roots`, what is in their sessions, and the descendants of all of them."""
    seen = [p for p in processes() if not p.zombie]
    found = {p.pid for p in seen if marks_of(p.pid).get(VARIABLE, "").startswith(prefix)}
    # All of a session came out of its leader, also what has lost its mark and its parent.
    roots = {*roots, *(p.pid for p in seen if p.pid in found and p.session == p.pid)}
    found |= {p.pid for p in seen if p.pid in roots or p.session in roots}
    grew = True
    while grew:
        more = {p.pid for p in seen if p.parent in found and p.pid not in found}
        found |= more
        grew = bool(more)
    return found - {os.getpid()}


def kill(prefix: str, roots: Iterable[int] = (), patience: float = 3.0) -> int:
    """SIGKILL the family again and again until nothing of it is left, or patience ends. Returns how many were killed."""
    killed: set[int] = set()
    until = time.monotonic() + patience
    roots = set(roots)
    while found := members(prefix, roots):
        for pid in found:
            try:
                if os.getsid(pid) == pid:
                    roots.add(pid)  # its session is looked for when it is gone, too
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            except ProcessLookupError:
                continue
            except PermissionError:  # became somebody else's (setuid): not ours to end
                continue
        if time.monotonic() > until:
            break
        time.sleep(0.005)
    return len(killed)


def adopt_orphans() -> bool:
    """Have the kernel give orphans of our descendants to this process instead of to init. False where it cannot."""
    try:
        import ctypes  # noqa: PLC0415  only the node needs it

        return bool(ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0)  # PR_SET_CHILD_SUBREAPER
    except (ImportError, OSError, AttributeError):
        return False


def rss_by_session(sessions: set[int]) -> dict[int, float]:
    """Memory in MB of all processes of each session: what a whole program uses, children included."""
    page = os.sysconf("SC_PAGE_SIZE") / 1e6
    used: dict[int, float] = {}
    for p in processes():
        if p.session in sessions:
            try:
                with open(f"/proc/{p.pid}/statm", encoding="ascii") as file:  # noqa: PTH123
                    used[p.session] = used.get(p.session, 0.0) + int(file.read().split()[1]) * page
            except OSError:
                continue
    return used


def pss_mb(root: int) -> float | None:
    """Memory in MB of a process and all its descendants, where what they share counts once. None where the system does not tell."""
    parents = {p.pid: p.parent for p in processes() if not p.zombie}
    total, told = 0.0, False
    for pid in parents:
        if _descends(pid, root, parents):
            try:
                with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:  # noqa: PTH123
                    total += sum(int(line.split()[1]) for line in file if line.startswith("Pss:")) * 1024 / 1e6
                    told = True
            except OSError:
                continue
    return round(total, 1) if told else None


def remove(folder: str | os.PathLike[str]) -> None:
    """Delete a directory and all in it; what cannot be deleted stays."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:  # whoever wrote there has nested it deeper than Python can follow
        with contextlib.suppress(OSError):
            subprocess.run(["rm", "-rf", "--", folder], check=False, stderr=subprocess.DEVNULL)


def guard(prefix: str, folders: Iterable[str] = ()) -> None:
    """Wait until the node is gone, then end its families and remove their directories. Signals do not end the guard: it must outlive
    the node.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 1024):
        pass
    time.sleep(_OWN)
    kill(prefix)
    for folder in folders:
        remove(folder)
        with contextlib.suppress(OSError):  # somebody else is in it
            os.rmdir(os.path.dirname(folder))  # noqa: PTH106, PTH120


if __name__ == "__main__":
    guard(sys.argv[1], sys.argv[2:])
