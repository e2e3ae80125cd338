"""A model's process from its start to its end: load, say ready, serve, leave. Standard library, Python 3.9."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import inspect
import math
import os
import signal
import socket
import sys
import time
import traceback
from types import FrameType
from typing import Any, NoReturn

from ostler import loading
from ostler.calls import current
from ostler.calls.serving import Door, Service
from ostler.errors import ConfigError
from ostler.lifecycle.child import APP_LOAD, MODEL_LOAD, Channel
from ostler.lifecycle.wire import Frame

MAX_BODY = 64 * 1024 * 1024
_VERSION = ".".join(map(str, sys.version_info[:3]))
_SPOKEN = ("embed", "chat", "transcribe")  # methods for OpenAI's routes; openai.py is loaded where there is one
_NEWS = 0.05  # seconds between two reports of progress


class Failed(Exception):
    """The model cannot be served; with the exit code that says why."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Running:
    """One process, one model."""

    def __init__(self, target: str, task: str, model_id: str, name: str, options: dict[str, Any]) -> None:
        self._target, self._task, self._model_id, self._name = target, task, model_id, name
        self._options = options
        self._concurrency = int(options.get("concurrency", 1))
        self._batch = int(options.get("batch", 1))
        self._wait = float(options.get("batch_wait", 0.0))
        self._told = 0.0
        self._loop: Any = None
        self._model: Any = None
        self._mode: Any = None
        self._terminated = False
        self._pid = os.getpid()
        self.service = Service(task, model_id, int(options.get("max_body", MAX_BODY)))
        self.service.stop = self.stop
        self._path = os.path.join(str(options.get("run") or os.getcwd()), name)  # noqa: PTH109, PTH118
        listener = _listen(self._path)
        self.service.door = self._door = Door(self.service, listener, max(self._concurrency, self._batch))
        self.channel = Channel(self._heard, self.service.facts)

    # ---- what others ask for, on their threads

    def _heard(self, frame: Frame) -> None:
        if frame[0] == "stop":
            self.stop()
        elif frame[0] in ("park", "wake"):
            which = frame[0]
            if self._mode is not None:
                self._mode.errand(lambda: self._change(which))

    def stop(self) -> None:
        """Finish what has begun, then leave. While it loads there is nothing to finish."""
        if self._mode is None:
            self._exit(0)
        self.service.draining = True
        self._door.shut()
        self._mode.wake()

    def terminate(self, _number: int, _frame: FrameType | None) -> None:
        """SIGTERM: as `stop`, and the calls that run are cancelled; the second time, at once."""
        if self._terminated or self._mode is None or os.getpid() != self._pid:  # a forked child has nothing to drain
            self._exit(128 + signal.SIGTERM)
        self._terminated = True
        for connection in self.service.calls():
            if (call := connection.call) is not None:
                call.cancelled = True
            if (cancel := connection.cancel) is not None:
                cancel()
        self.stop()

    # ---- the main thread

    def run(self) -> None:
        """From the start to ready, and until it is told to leave."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self.terminate)
        self.channel.open()
        self._door.start()
        try:
            kind = self._find()
            gc.enable()  # worker.py has switched it off
            self._load(kind)
        except Failed as error:
            self.channel.send("failed", str(error)[:2000])
            self._exit(error.code)
        self._mode = mode = self._chosen()
        self._listen_for_speech(kind)
        self.service.state, self.service.progress = "ready", 1.0
        self.service.adopt, self.service.part = mode.adopt, getattr(mode, "part", None)
        self.channel.send("ready", self._info())
        try:
            mode.serve()
        except BaseException:  # noqa: BLE001  a mistake of the server's: the node starts a fresh worker
            traceback.print_exc()
            self._exit(1)
        self._unload()
        self._exit(0)

    def _find(self) -> Any:
        """The class that the app declares; raises Failed."""
        try:
            app: Any = loading.find(self._target, _app_type())
        except ConfigError as error:
            message = _explain(self._target, error, self._options)
            print(message, file=sys.stderr)  # noqa: T201
            raise Failed(APP_LOAD, message.partition("\n")[0]) from None
        if "logging" in sys.modules:
            import logging  # noqa: PLC0415  loading it costs a third of the start of a small model

            logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        spec = app.models.get(self._task)
        if spec is None or spec.target is None:
            known = ", ".join(sorted(app.models)) or "none"
            message = f"{self._target} declares no model {self._task!r}; known: {known}"
            print(message, file=sys.stderr)  # noqa: T201
            raise Failed(APP_LOAD, message)
        return spec.target

    def _load(self, kind: Any) -> None:
        """Make the model, load it, run its example; raises Failed."""
        began = time.perf_counter()
        current.progress = self._progress
        try:
            self._model = model = kind()
            self._finished(model.load(self._model_id), self._progress)
            if getattr(model, "example", None) is not None:
                self._warm(model)
        except BaseException as error:  # noqa: BLE001  SystemExit too
            lines = traceback.format_exception(type(error), error, error.__traceback__)
            what = f"model {self._model_id} of {self._task} cannot be loaded"
            print(f"{what}:\n{''.join(lines)}", end="", file=sys.stderr)  # noqa: T201
            raise Failed(MODEL_LOAD, lines[-1].strip() or type(error).__name__) from None
        finally:
            current.progress = None
        self.service.load_ms = round((time.perf_counter() - began) * 1000, 1)

    def _warm(self, model: Any) -> None:
        """Run the example as a call would be run: a model that fails it is not ready."""
        if self._batch > 1 or not hasattr(model, "infer"):
            result = self._finished(model.infer_batch([model.example]))
            if isinstance(result, (list, tuple)) and result and isinstance(result[0], BaseException):
                raise result[0]
        else:
            self._finished(model.infer(model.example))

    def _finished(self, result: Any, each: Any = lambda _item: None) -> Any:
        """What it comes to: a generator is run to its end, a coroutine is awaited."""
        if hasattr(result, "__next__"):
            for item in result:
                each(item)
        elif hasattr(result, "__anext__"):
            return self._awaited(_each(result, each))
        elif hasattr(result, "__await__"):
            return self._awaited(result)
        return result

    def _awaited(self, coroutine: Any) -> Any:
        return self._own_loop().run_until_complete(coroutine)

    def _own_loop(self) -> Any:
        if self._loop is None:
            import asyncio  # noqa: PLC0415  only where the model is async

            self._loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self._loop)
        return self._loop

    def _progress(self, fraction: Any) -> None:
        """Tell the node how far loading is, when it has grown."""
        if fraction is None:
            return
        if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not math.isfinite(fraction):
            raise TypeError(f"progress of load() must be a number from 0 to 1, found {fraction!r}")
        fraction = min(1.0, max(0.0, float(fraction)))
        now = time.monotonic()
        if fraction > self.service.progress and (now - self._told >= _NEWS or fraction == 1.0):
            self.service.progress, self._told = fraction, now
            self.channel.send("loading", round(fraction, 4))

    def _chosen(self) -> Any:
        """How it is served: an async model on an event loop, else batches or one at a time here, else a thread for each call."""
        model, batch = self._model, self._batch
        if batch == 1 and not hasattr(model, "infer"):
            model = _Alone(model)
        function = model.infer if batch == 1 else model.infer_batch
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            from ostler.calls.looped import Looped  # noqa: PLC0415

            return Looped(self.service, model, self._own_loop(), self._concurrency, batch, self._wait)
        if batch == 1 and self._concurrency > 1:
            from ostler.calls.threads import Threads  # noqa: PLC0415

            return Threads(self.service, model, self._concurrency)
        from ostler.calls.inline import Inline  # noqa: PLC0415

        return Inline(self.service, model, batch, self._wait)

    def _listen_for_speech(self, kind: Any) -> None:
        """Answer OpenAI's routes, too, where the class has the methods."""
        if any(hasattr(kind, method) for method in _SPOKEN):
            from ostler.calls.openai import speeches  # noqa: PLC0415  few models speak it

            self.service.speeches = {**self.service.speeches, **speeches(self._model, self._model_id)}

    def _info(self) -> dict[str, Any]:
        """What the node is told with `ready`. `concurrency` is how many connections are of use."""
        function = getattr(self._model, "infer", None) if self._batch == 1 else None
        return {
            "socket": self._name,
            "load_ms": self.service.load_ms,
            "concurrency": max(self._concurrency, self._batch),
            "streams": inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function),
            "parks": hasattr(self._model, "park") and hasattr(self._model, "wake"),
            "python": _VERSION,
        }

    def _change(self, which: str) -> None:
        """Park or wake the model, between calls."""
        began = time.perf_counter()

        def done() -> None:
            self.service.state = "parked" if which == "park" else "ready"
            spent = round((time.perf_counter() - began) * 1000, 1)
            self.channel.send("parked" if which == "park" else "woken", spent)

        def wrong(error: BaseException) -> None:
            traceback.print_exception(type(error), error, error.__traceback__)
            self.channel.send("trouble", which, f"{type(error).__name__}: {error}"[:2000])

        try:
            result = getattr(self._model, which)()
            if hasattr(result, "__await__"):
                task = self._own_loop().create_task(_settle(result, done, wrong))
                if not self._loop.is_running():
                    self._loop.run_until_complete(task)
                return
        except BaseException as error:  # noqa: BLE001
            wrong(error)
            return
        done()

    def _unload(self) -> None:
        """What the model wants to do at its end. An error there is logged, and no more."""
        try:
            if hasattr(self._model, "unload"):
                self._finished(self._model.unload())
        except BaseException:  # noqa: BLE001
            traceback.print_exc()

    def _exit(self, code: int) -> NoReturn:
        """Leave now: neither threads of the model nor a slow teardown of its libraries hold the memory any longer."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                os.unlink(self._path)  # noqa: PTH108
        if code == 0 and self._mode is not None:
            import atexit  # noqa: PLC0415

            with contextlib.suppress(BaseException):
                atexit._run_exitfuncs()  # noqa: SLF001
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)


class _Alone:
    """A model that has only `infer_batch`, for calls one at a time."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.infer = self._later if inspect.iscoroutinefunction(model.infer_batch) else self._now

    def _now(self, payload: Any) -> Any:
        return _only(self._model.infer_batch([payload]))

    async def _later(self, payload: Any) -> Any:
        return _only(await self._model.infer_batch([payload]))


def _only(results: Any) -> Any:
    from ostler.calls.inline import paired  # noqa: PLC0415

    (result,) = paired([None], results)
    if isinstance(result, BaseException):
        raise result
    return result


async def _each(items: Any, each: Any) -> None:
    async for item in items:
        each(item)


async def _settle(work: Any, done: Any, wrong: Any) -> None:
    try:
        await work
    except BaseException as error:  # noqa: BLE001
        wrong(error)
    else:
        done()


def _listen(path: str) -> socket.socket:
    """A socket for this user alone. It is bound by its short name: a path of more than 107 bytes cannot be."""
    folder, name = os.path.split(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before, mask = os.open(".", os.O_RDONLY), os.umask(0o177)
    try:
        os.chdir(folder)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)  # noqa: PTH108
        listener.bind(name)
        listener.listen(128)
    finally:
        os.umask(mask)
        os.fchdir(before)
        os.close(before)
    listener.setblocking(False)
    return listener


def _app_type() -> Any:
    from ostler import Ostler  # noqa: PLC0415  the real one, or the stand-in

    return Ostler


def _explain(target: str, error: ConfigError, options: dict[str, Any]) -> str:
    """What is wrong with the file; in another environment most often an import that exists only in the node's own."""
    cause = error.__cause__
    where = options.get("env")
    if not options.get("foreign") or cause is None:
        return str(error)
    place = f"environment {where!r} ({sys.executable}, Python {_VERSION})"
    trace = "".join(traceback.format_exception(type(cause), cause, cause.__traceback__)).strip()
    if isinstance(cause, ImportError):
        what = f"it imports {cause.name!r}{_line(cause, target)}, which {_missing(cause)} there"
        advice = (
            "top-level imports of the file that declares a model must exist in the model's environment: "
            "install it there, or import it inside load() and wherever else it is used"
        )
    else:
        what = f"{type(cause).__name__}: {cause}"
        advice = "the file that declares a model must also run under the Python of the model's environment"
    return f"{target} cannot be loaded in {place}: {what}; {advice}\n{trace}"


def _missing(cause: ImportError) -> str:
    return "is not installed" if isinstance(cause, ModuleNotFoundError) else f"cannot be imported ({cause})"


def _line(cause: BaseException, target: str) -> str:
    """The line of the user's file, if it is there that it went wrong."""
    name = os.path.basename(target.partition(":")[0])  # noqa: PTH119
    found = [f for f in traceback.extract_tb(cause.__traceback__) if os.path.basename(f.filename) == name]  # noqa: PTH119
    return f" (line {found[-1].lineno})" if found else ""


def main(argv: list[str], options: dict[str, Any]) -> NoReturn:
    """Run the worker. `argv`: the app's file, the task, the model's id, the name of the socket in the run directory."""
    faulthandler.enable(os.dup(2), all_threads=False)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if len(argv) != 4:
        sys.exit("worker.py is started by a node, with TARGET TASK MODEL_ID SOCKET OPTIONS")
    target, task, model_id, name = argv
    Running(target, task, model_id, name, options).run()
    raise AssertionError  # `run` leaves the process
