"""Jobs without manners: what tests/jobs/test_rough_jobs.py runs on real workers."""

from __future__ import annotations

import asyncio
import ctypes
import json
import locale
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

from ostler import Fail, Job, Ostler, Retry, Snooze

app = Ostler()

LIMITS = ("AS", "CPU", "DATA", "FSIZE", "NOFILE", "NPROC", "STACK")


@app.job(queue="rough", attempts=1)
def state(job: Job) -> dict:
    """Everything that a job could have changed and the next one would feel."""
    print("said", job.id)
    sys.stdout.flush()
    print("to stderr", job.id, file=sys.stderr)
    import resource

    mask = os.umask(0)
    os.umask(mask)
    return {
        "cwd": os.getcwd(),
        "umask": mask,
        "recursion": sys.getrecursionlimit(),
        "limits": {name: resource.getrlimit(getattr(resource, f"RLIMIT_{name}")) for name in LIMITS},
        "handlers": {s.name: str(signal.getsignal(s)).partition(" at 0x")[0] for s in signal.valid_signals() if s < 32},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "timer": signal.getitimer(signal.ITIMER_REAL),
        "files": [os.readlink(f"/proc/self/fd/{n}").partition(":")[0] for n in range(3)],
        "streams": [sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__],
        "locale": locale.setlocale(locale.LC_ALL),
        "environ": {k: os.environ.get(k) for k in ("PATH", "OSTLER_DATA", "HOME")},
        "pid": os.getpid(),
    }


def _close_loop() -> None:
    asyncio.get_event_loop().close()


def _lower(*, hard: bool) -> None:
    import resource

    for name in LIMITS:
        kind = getattr(resource, f"RLIMIT_{name}")
        most = resource.getrlimit(kind)[1]
        low = {"AS": 2 << 30, "CPU": 5000, "NOFILE": 64, "NPROC": 5000}.get(name, 1 << 30)
        resource.setrlimit(kind, (low, low if hard else most))


def _handlers() -> None:
    for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGCHLD, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGTERM else lambda *_: sys.exit(5))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR2])


def _timer() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.3)


def _close_files() -> None:
    for number in (0, 1, 2):
        os.close(number)


def _replace_streams() -> None:
    sys.stdout = sys.stderr = open(os.devnull, "w")


def _close_streams() -> None:
    sys.stdin.close()
    sys.stdout.close()
    sys.stderr.close()


def _lost_cwd() -> None:
    gone = Path(os.environ["OSTLER_DATA"]) / f"gone-{time.monotonic_ns()}"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()


def _environ() -> None:
    os.environ["OSTLER_DATA"] = "/nowhere"
    os.environ["PATH"] = "/nowhere"
    del os.environ["HOME"]


ROUGH = {
    "closes the event loop": _close_loop,
    "leaves no event loop behind": lambda: asyncio.run(asyncio.sleep(0)),
    "lowers its limits": lambda: _lower(hard=False),
    "leaves for another directory": lambda: os.chdir("/"),
    "leaves for a directory that is deleted": _lost_cwd,
    "lowers the recursion limit": lambda: sys.setrecursionlimit(100),
    "sets the umask": lambda: os.umask(0o777),
    "replaces and blocks signals": _handlers,
    "leaves a timer": _timer,
    "closes the standard files": _close_files,
    "closes the standard streams": _close_streams,
    "replaces the standard streams": _replace_streams,
    "sets the locale": lambda: locale.setlocale(locale.LC_ALL, "C"),
    "changes the environment": _environ,
}


@app.job(queue="rough", attempts=1)
def rough(job: Job, what: str, fail: bool = False) -> str:
    ROUGH[what]()
    if fail:
        raise OSError("and it fails as well")
    return what


@app.job(queue="rough", attempts=1)
def lowers_hard_limits(job: Job) -> int:
    _lower(hard=True)
    return os.getpid()


@app.job(queue="rough", attempts=1)
async def sleeps(job: Job) -> str:
    await asyncio.sleep(0)
    return "slept"


@app.job(queue="rough", attempts=1)
def gets_a_loop(job: Job) -> str:
    return str(asyncio.get_event_loop().run_until_complete(asyncio.sleep(0, "looped")))


class BareRetry(Retry):
    def __init__(self) -> None: ...


class BareSnooze(Snooze):
    def __init__(self) -> None: ...


class BareFail(Fail):
    def __init__(self) -> None: ...


class OddRetry(Retry):
    after = "soon"  # type: ignore[assignment]

    def __init__(self) -> None: ...


class Exits(Exception):
    def __str__(self) -> str:
        sys.exit(1)


class Wordless(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]


class OddFail(Fail):
    def __init__(self) -> None:
        super().__init__(Exits())  # type: ignore[arg-type]


class Nameless(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise SystemExit


class Unspeakable(Exception, metaclass=Nameless):
    pass


ODD = {c.__qualname__: c for c in (BareRetry, BareSnooze, BareFail, OddRetry, Exits, Wordless, OddFail, Unspeakable)}


@app.job(queue="rough", attempts=2)
def raises(job: Job, what: str) -> None:
    raise ODD[what]


@app.job(queue="rough", attempts=1)
def renames_itself(job: Job) -> str:
    job.id, job.fence = 12345, 99
    return "done"


def _child(job: Job, errors: str) -> None:
    for use in (lambda: job.event("from a child"), lambda: job.progress(50), lambda: job.publish(__file__, "x/y")):
        try:
            use()
        except Exception as error:
            with open(errors, "a") as file:
                file.write(f"{type(error).__name__}: {error}\n")


@app.job(queue="rough", attempts=1)
def forks(job: Job, errors: str) -> str:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_child, args=(job, errors)) for _ in range(4)]
    for child in children:
        child.start()
    for n in range(50):
        job.event("from the parent", {"n": n, "padding": "x" * 5000})
    for child in children:
        child.join()
    return "forked"


@app.job(queue="rough", attempts=1)
def child_comes_back(job: Job) -> int:
    pid = os.fork()
    if pid == 0:
        raise OSError("the child's own trouble")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@app.job(queue="rough", attempts=1)
def publishes_at_once(job: Job, same: bool = False) -> list[str]:
    """Eight threads of one job, each with a file of its own; all under one key, or each under another."""
    told: list[str] = []
    together = threading.Barrier(8)

    def publish(n: int) -> None:
        try:
            together.wait()
            path = job.scratch / str(n)
            path.write_text(str(n) * 100_000)
            together.wait()
            told.append(job.publish(path, f"{job.id}/{'one' if same else n}").key)
        except Exception as error:
            told.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=publish, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(told)


def _into_the_void(how: str) -> None:
    if how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    ctypes.string_at(0)


@app.job(queue="rough", attempts=1)
def segfaults(job: Job, how: str) -> None:
    print("before the fault of", job.id)
    if how == "hidden":  # where a library has put its own standard error
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    _into_the_void(how)


@app.job(queue="rough", attempts=1)
def environment(job: Job) -> dict:
    """What a program that a job starts could read of its worker."""
    found = Path(f"/proc/{os.getpid()}/environ").read_bytes().decode(errors="replace")
    return {"proc": found, "own": json.dumps(dict(os.environ))}


@app.job(queue="rough", attempts=1)
def forges(job: Job, of: int, tokens: list[str]) -> None:
    for token in ["", *tokens]:
        print(f"\x1e{token} {of}\nforged", flush=True)
