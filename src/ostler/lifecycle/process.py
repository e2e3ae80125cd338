"""One OS process of a worker: exec'd in a session of its own, with a control channel and its output in a log.

Death is seen at once, by pidfd. What the dead process had still sent is read before its end is told, so a result that
was written before a SIGKILL counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ostler.lifecycle import family
from ostler.lifecycle.child import CONTROL, DESCRIPTOR, STACK
from ostler.lifecycle.logs import Writer
from ostler.lifecycle.wire import Frame, Frames, encode

log = logging.getLogger("ostler.lifecycle")

# A worker that prints `\x1e<token> <number>` as a line says whose output follows. In the output itself, so that it is in order;
# with a token of its own, so that nothing which a job prints can be taken for it. The token goes over the control channel: programs
# that a job starts could read it in the environment.

# As the node was started. It raises its own limit for its many clients; what it starts gets this one back: programs that use
# select(), or close all that could be open, count on it.
_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)

_REST = 0.001  # between two looks at a process that has much to do and says much
_LOG_LINES = 40
_LINE_LENGTH = 2000


@dataclass(frozen=True, slots=True)
class Ended:
    """How a process ended: `code` as Python gives it, negative for a signal."""

    code: int
    at: float
    peak_rss_mb: float | None
    known: bool = True  # False: the code could not be had

    @property
    def signal(self) -> str | None:
        if self.code >= 0:
            return None
        try:
            return signal.Signals(-self.code).name
        except ValueError:
            return f"SIG{-self.code}"


@dataclass(frozen=True, slots=True)
class Launch:
    """What to exec. `beat` is given to processes that speak the control channel; None for programs that do not."""

    argv: Sequence[str]
    env: Mapping[str, str]
    mark: str
    log: Path
    cwd: str | None = None
    beat: float | None = None
    descriptors: Mapping[str, int] = field(default_factory=dict)  # open files that it inherits: see child.inherited
    nice: int = 0


class Process:
    """A running (or ended) process. All callbacks come on the loop."""

    def __init__(
        self,
        launch: Launch,
        *,
        on_frame: Callable[[Frame], None],
        on_line: Callable[[str], None],
        on_labelled: Callable[[str, list[bytes]], None],
        on_printed: Callable[[], None],
        on_end: Callable[[Ended], None],
        on_garbage: Callable[[str], None],
        unhurried: Callable[[], bool] = lambda: False,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._unhurried, self._resting = unhurried, False
        self._on_frame, self._on_line, self._on_end, self._on_garbage = on_frame, on_line, on_end, on_garbage
        self._on_labelled, self._on_printed = on_labelled, on_printed
        self._label = ""
        self._said: deque[bytes] = deque(maxlen=_LOG_LINES)  # since the worker gave that label
        self._token = secrets.token_hex(8)
        self._mark = b"\x1e" + self._token.encode() + b" "
        self._marker = re.compile(b"(.*)" + self._mark + rb"(\d{1,18})", re.DOTALL)
        self._frames = Frames()
        self._unsent = bytearray()
        self._partial = b""
        self.tail: deque[str] = deque(maxlen=_LOG_LINES)
        self.peak_rss_mb = 0.0
        self.ended: Ended | None = None
        self.mark = launch.mark
        self._inherited_peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self._log = Writer(launch.log)
        self._log.write(b"")  # the file is there from the start, also when nothing is printed
        self._socket: socket.socket | None = None
        self._popen = self._spawn(launch)
        self.pid = self._popen.pid
        if sys.platform == "linux":
            # After the start, from here: code of ours between fork and exec would cost a slower fork of the whole node.
            with contextlib.suppress(OSError):  # it has ended already
                resource.prlimit(self.pid, resource.RLIMIT_NOFILE, _FILES)
        if launch.nice:
            with contextlib.suppress(OSError):
                own = os.getpriority(os.PRIO_PROCESS, 0)
                os.setpriority(os.PRIO_PROCESS, self.pid, own + launch.nice)  # the system knows no more than 19
        self.started = family.start_time(self.pid)
        try:
            self._watch()
            self.send("label", self._token)
        except BaseException:  # it must not run on unwatched
            os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait()
            raise

    def _spawn(self, launch: Launch) -> subprocess.Popen[bytes]:
        env = {**launch.env, family.VARIABLE: launch.mark}
        env |= {DESCRIPTOR + name: str(number) for name, number in launch.descriptors.items()}
        theirs: socket.socket | None = None
        self._output, output = os.pipe()
        try:
            if launch.beat is not None:
                self._socket, theirs = socket.socketpair()
                env[CONTROL] = f"{theirs.fileno()}:{launch.beat}"
            return subprocess.Popen(
                launch.argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                cwd=launch.cwd,
                pass_fds=[*launch.descriptors.values(), *([theirs.fileno()] if theirs else [])],
                start_new_session=True,
            )
        except BaseException:
            os.close(self._output)
            if self._socket:
                self._socket.close()
            self._log.close()
            raise
        finally:
            os.close(output)
            if theirs:
                theirs.close()

    def _watch(self) -> None:
        os.set_blocking(self._output, False)
        self._loop.add_reader(self._output, self._read_output)
        if self._socket:
            self._socket.setblocking(False)
            self._loop.add_reader(self._socket.fileno(), self._read_frames)
        if hasattr(os, "pidfd_open"):
            self._pidfd = os.pidfd_open(self.pid)
            self._loop.add_reader(self._pidfd, self._reap)
        else:  # not Linux: a thread waits without reaping
            self._pidfd = -1
            threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._reap)

    # ---- the channel

    def send(self, *frame: object) -> None:
        """Queue a frame for the process; silently nothing when it has ended."""
        if self._socket is None or self.ended is not None:
            return
        data = encode(list(frame))
        if not self._unsent:
            try:
                sent = self._socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # it is dying: the pidfd tells in a moment
            if sent == len(data):
                return
            data = data[sent:]
            self._loop.add_writer(self._socket.fileno(), self._write)
        self._unsent += data

    def _write(self) -> None:
        assert self._socket is not None
        try:
            del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()
        if not self._unsent:
            self._loop.remove_writer(self._socket.fileno())

    def _read_frames(self) -> None:
        if self._socket is None:
            return
        try:
            data = self._socket.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._socket.fileno())
            return
        self._tell(self._frames.feed(data))
        if self._frames.broken and self._socket is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._on_garbage(self._frames.broken)
        elif self._socket is not None and not self._resting and self._unhurried():
            self._rest()

    def _rest(self) -> None:
        """Read in a moment what it says meanwhile, all at once. Its end is noticed at once all the same."""
        assert self._socket is not None
        self._resting = True
        self._loop.remove_reader(self._socket.fileno())
        self._loop.remove_reader(self._output)
        self._loop.call_later(_REST, self._look)

    def _look(self) -> None:
        self._resting = False
        if self._socket is None or self.ended is not None:
            return
        self._loop.add_reader(self._output, self._read_output)
        self._loop.add_reader(self._socket.fileno(), self._read_frames)
        self._read_output()
        self._read_frames()

    def _tell(self, frames: list[Frame]) -> None:
        """One frame that cannot be handled does not swallow the others."""
        for frame in frames:
            try:
                self._on_frame(frame)
            except Exception as error:
                log.exception("a frame of pid %d could not be handled: %.200s", self.pid, frame)
                self._on_garbage(f"{frame[0]}: {error}")

    # ---- its output

    def _read_output(self) -> bool:
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._output)
            return False
        if not self._partial and self._is_labels(data):
            self._label = data[data.rindex(b" ") + 1 : -1].decode()
            self._said.clear()
            return True
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > _LINE_LENGTH:
            lines.append(self._partial)
            self._partial = b""
        self._take(lines)
        return True

    def _is_labels(self, data: bytes) -> bool:
        """Whether each line is a label, as in a flood of short jobs that print nothing."""
        mark = self._mark
        return data.startswith(mark) and data[-1] == 10 and data.count(b"\n" + mark) + 1 == data.count(b"\n")

    def _take(self, lines: list[bytes]) -> None:
        """Complete lines: into the log, to whoever listens, and under the label that the worker gave last."""
        kept: list[bytes] = []
        labelled: list[bytes] = []
        for line in lines:
            if b"\x1e" in line and (found := self._marker.fullmatch(line)):
                before, label = found.groups()
                if before:
                    kept.append(before)
                    labelled.append(before)
                if labelled and self._label:
                    self._on_labelled(self._label, labelled)
                labelled, self._label = [], label.decode()
                self._said.clear()
                continue
            kept.append(line)
            labelled.append(line)
            self._said.append(line[:_LINE_LENGTH])
        if labelled and self._label:
            self._on_labelled(self._label, labelled)
        if kept:
            self._log.write(b"\n".join(kept) + b"\n")
            self._on_printed()
        for line in kept:
            text = line[:_LINE_LENGTH].decode(errors="replace").rstrip("\r")
            self.tail.append(text)
            self._on_line(text)

    def said(self, label: str) -> str | None:
        """The last lines since the worker gave this label; None when it gave another one since, or said nothing."""
        if self._label != label or not self._said:
            return None
        return b"\n".join(self._said).decode(errors="replace")

    # ---- its end

    def signal(self, number: int) -> None:
        """Send a signal to the whole process group."""
        if self.ended is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def show_stack(self) -> bool:
        """Have a job's worker print where it is; False where that cannot be had."""
        if self.ended is not None or STACK is None:
            return False
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, STACK)
        return True

    def _reap(self) -> None:
        if self.ended is not None:
            return
        # The group goes before the leader is reaped: until then nobody else can get its number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code, peak, known = 255, 0, True
        try:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid == 0:
                return
            code, peak = os.waitstatus_to_exitcode(status), usage.ru_maxrss
        except ChildProcessError:  # somebody else reaped it: it is gone all the same
            known = False
        self._popen.returncode = code
        try:
            self._drain()
        except Exception:
            log.exception("what pid %d left unread could not be taken", self.pid)
        # The kernel counts what the process was before exec too, so the figure is its own only above the node's.
        if peak > self._inherited_peak:
            self.peak_rss_mb = max(self.peak_rss_mb, round(peak * 1024 / 1e6, 1))
        self.ended = Ended(code, time.monotonic(), self.peak_rss_mb or None, known)
        self._on_end(self.ended)

    def _drain(self) -> None:
        """Read what was sent before the end, then close everything, also when a grandchild still holds the other end."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        if self._socket:
            with contextlib.suppress(OSError, ValueError):
                while data := self._socket.recv(1 << 18):
                    self._tell(self._frames.feed(data))
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()
            self._socket = None
        for _ in range(64):  # at most 4 MB: a grandchild may write for ever
            if not self._read_output():
                break
        if self._partial:
            self._take([self._partial])
        self._loop.remove_reader(self._output)
        os.close(self._output)
        self._log.close()


def oom_kills() -> int:
    """How often the kernel has killed for memory: since boot, and in our own control group."""
    total = 0
    paths = [Path("/proc/vmstat")]
    with contextlib.suppress(OSError, IndexError):
        own = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()[-1].rpartition(":")[2]
        paths.append(Path("/sys/fs/cgroup") / own.lstrip("/") / "memory.events")
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text(encoding="ascii").splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    total += int(value)
    return total
