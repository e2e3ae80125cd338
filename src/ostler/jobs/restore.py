"""What a job may change in its worker and the next job would feel: put back between two jobs. Standard library alone.

Everything is compared first and written only where it differs: a job that changes nothing pays a few microseconds. Python objects
(modules, caches, a model that was loaded once) are left alone.
"""

from __future__ import annotations

import _locale
import _signal  # type: ignore[import-not-found]  # that of `signal` makes enums: 30 times slower
import faulthandler
import locale
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from ostler.lifecycle.child import STACK

log = logging.getLogger("ostler.jobs")

_ABSENT = "resource" not in sys.modules
import resource  # noqa: E402

if _ABSENT:
    # Seven system calls for each job are too many: limits are looked at only where somebody else has imported it too.
    del sys.modules["resource"]

_LIMITS = tuple(
    getattr(resource, f"RLIMIT_{name}") for name in ("AS", "CPU", "DATA", "FSIZE", "NOFILE", "NPROC", "STACK")
)
_SIGNALS = tuple(sorted({int(s) for s in signal.valid_signals() if s < 32} - {signal.SIGKILL, signal.SIGSTOP}))
_umask, _dup2, _getcwd, _setlocale = os.umask, os.dup2, os.getcwd, _locale.setlocale
_VARIABLES: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # noqa: SLF001  what os.environ compares slowly


def show_faults(descriptor: int) -> None:
    """Write the Python stack of a segfault or of a job that overran there: of one thread alone, so that it fits into a record."""
    faulthandler.enable(descriptor, all_threads=False)
    if STACK is not None:  # asked for by the node, before it kills a job that overran its timeout
        faulthandler.register(STACK, descriptor, all_threads=False)


class Baseline:
    """This process as it is now, to come back to after every job."""

    def __init__(self, before: Baseline | None = None) -> None:
        self._descriptors = [os.dup(number) for number in range(3)]
        self._streams: dict[str, TextIO] = {name: getattr(sys, name) for name in ("stdin", "stdout", "stderr")}
        self._loop: Any = before and before._loop  # noqa: SLF001  the event loop of async jobs
        self._cwd = str(Path.cwd())
        self._recursion = sys.getrecursionlimit()
        self._umask = os.umask(0o077)
        os.umask(self._umask)
        self._handlers = tuple(map(_signal.getsignal, _SIGNALS))
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._limits = tuple(map(resource.getrlimit, _LIMITS))
        self._locale = locale.setlocale(locale.LC_ALL)
        self._environ = dict(_VARIABLES)
        self._variables = dict(_VARIABLES)  # as they were after the last job
        self._steps: tuple[tuple[str, Callable[[], object]], ...] = (
            ("the recursion limit", lambda: sys.setrecursionlimit(self._recursion)),  # the others may need it
            ("signals", self._restore_signals),
            ("limits", self._restore_limits),
            ("the standard streams", self._restore_streams),
            ("the working directory", lambda: os.chdir(self._cwd)),
            ("the environment", self._restore_environ),
            ("the locale", lambda: locale.setlocale(locale.LC_ALL, self._locale)),
            ("the event loop", self._restore_loop),
        )
        self._same = self._read()

    def restore(self) -> str | None:
        """Put back what differs. What could not be put back, in words: then no other job should run in this process."""
        try:
            if self._read() == self._same:
                return None
        except Exception:  # noqa: BLE001, S110  it cannot even be read, as a working directory that was deleted
            pass
        left = []
        for what, step in self._steps:
            try:
                step()
            except Exception as error:  # noqa: BLE001
                left.append(f"{what} ({type(error).__name__}: {error})")
        try:
            self._same = self._read()
        except Exception as error:  # noqa: BLE001
            left.append(f"its own state ({type(error).__name__}: {error})")
        return ", ".join(left) or None

    def _read(self) -> tuple[Any, ...]:
        """All that is compared. The umask, descriptors and current event loop are as quickly written as read."""
        _umask(self._umask)
        stdin, stdout, stderr = self._descriptors
        _dup2(stdin, 0)
        _dup2(stdout, 1)
        _dup2(stderr, 2)
        return (
            sys.getrecursionlimit(),
            sys.stdin,
            sys.stdout,
            sys.stderr,
            [stream.closed for stream in self._streams.values()],
            faulthandler.is_enabled(),
            _signal.getitimer(_signal.ITIMER_REAL),
            [*map(_signal.getsignal, _SIGNALS)],
            _signal.pthread_sigmask(_signal.SIG_BLOCK, ()),
            [*map(resource.getrlimit, _LIMITS)] if "resource" in sys.modules else None,
            _getcwd(),
            _setlocale(locale.LC_ALL),
            self._variables == _VARIABLES,
            self._restore_loop(),
        )

    def loop(self) -> Any:
        """The event loop that async jobs share, so that clients which a job keeps stay usable for the next one."""
        import asyncio  # noqa: PLC0415  only workers with async jobs pay for it

        if self._loop is None or self._loop.is_closed():
            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop

    def write(self, data: bytes) -> None:
        """Write to the real standard output."""
        os.write(self._descriptors[1], data)

    # ---- the steps

    def _restore_signals(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)  # before its handler goes: the default would end the worker
        for number, handler in zip(_SIGNALS, self._handlers, strict=True):
            if handler is not None:  # None: set by a library in C, which cannot be put back from here
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)

    def _restore_limits(self) -> None:
        for kind, limit in zip(_LIMITS, self._limits, strict=True):
            resource.setrlimit(kind, limit)  # ValueError when the hard one was lowered

    def _restore_streams(self) -> None:
        for number, (name, stream) in enumerate(self._streams.items()):
            if stream.closed:
                self._reopen(number, name, stream)
            else:
                setattr(sys, name, stream)
        if not faulthandler.is_enabled():
            show_faults(self._descriptors[2])

    def _reopen(self, number: int, name: str, closed: TextIO) -> None:
        stream = open(  # noqa: SIM115
            number,
            "r" if number == 0 else "w",
            buffering=1,
            encoding=closed.encoding,
            errors=closed.errors,
            closefd=False,
        )
        self._streams[name] = stream
        for known in (name, f"__{name}__"):
            setattr(sys, known, stream)
        for handler in logging.getLogger().handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is closed:
                handler.stream = stream  # `setStream` would flush the closed one

    def _restore_environ(self) -> None:
        """Variables that were set get their value back; new ones stay, because libraries set some when they are first imported."""
        for name, value in self._environ.items():
            if os.environb.get(name) != value:
                os.environb[name] = value
        self._variables = dict(_VARIABLES)

    def _restore_loop(self) -> bool:
        """`asyncio.run` in a job leaves no current loop behind."""
        used = "asyncio" in sys.modules
        if used:
            sys.modules["asyncio"].set_event_loop(self.loop())
        return used
