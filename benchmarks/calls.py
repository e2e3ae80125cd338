"""Calls to warm models: what the gateway costs, beside the worker's own socket and beside other servers. One run prints one table.

    python benchmarks/calls.py [--only latency,throughput,…] [--libs FOLDER] [--quick] [--overload SECONDS]

All figures are ratios within this run. The sides take turns in short rounds, so that a slow moment of the machine hits all of them;
printed is the median of the rounds' ratios, and in brackets the lowest and the highest. Node, plane, worker and client share the cores.

LitServe, mosec, FastAPI and uvicorn are looked for in FOLDER (`pip install --target FOLDER litserve mosec fastapi uvicorn`); a side
that is not there is left out. `--pin CPU` keeps all processes on one core: then no time goes into waking another one.

    latency      p50 through the gateway over the worker's own socket: no-op with 1 KB each way, 5 ms and 50 ms of work. `relay` is a
                 process that only copies bytes (calls_relay.py): no gateway in Python can be below it
    throughput   no-op calls a second with 64 and 8 clients beside the seed's design, LitServe and mosec; 5 ms of work, 8 clients
    audio        25 MB as they are over the same as base64 in JSON, both through the gateway
    stream       time to the first item (20 ms of work) through the gateway over direct
    cold         the first reply of a model that is not loaded, less a bare interpreter that loads it and infers
    loading      p99 of a warm model while another one loads (20 s), over alone
    jobs         p99 of a warm model while the node drains no-op jobs, over its p99 beside two foreign busy loops
    overload     10 times what a model can serve: rejects, accepted calls, memory
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from calls_client import Connect, Flood, ask, first_item, rate, request, tcp, unix

HERE = Path(__file__).resolve().parent
KB = "x" * 1000
NOOP = {"model": "noop", "payload": {"text": KB}}


class Node:
    """`ostler up` with the models of calls_app.py."""

    def __init__(self) -> None:
        self.data = Path(tempfile.mkdtemp(prefix="ostler-calls-"))
        env = {
            **os.environ,
            "OSTLER_DATA": str(self.data),
            "OSTLER_LOG_LEVEL": "error",
            "OSTLER_LOAD_THRESHOLD": "1000",  # what else runs on the machine must not pause the claiming
        }
        argv = [sys.executable, "-m", "ostler", "up", str(HERE / "calls_app.py"), "--port", "0", "--pool", "bench=2"]
        self.process = subprocess.Popen(argv, env=env, cwd=self.data)
        url = wait(lambda: json.loads((self.data / "node.json").read_text())["url"])
        self.url, self.port = url, int(url.rpartition(":")[2].strip("/"))
        wait(lambda: urllib.request.urlopen(f"{url}/readyz").status == 200)

    def connect(self) -> socket.socket:
        return tcp(self.port)()

    def call(self, task: str, payload: object = None, **more: object) -> bytes:
        """A call as bytes, through the gateway."""
        return request(f"/api/v1/calls/{task}", {"model": task, "payload": payload, **more})

    def direct(self, task: str) -> Connect:
        """The own socket of a model's worker; the model is loaded first."""
        with self.connect() as connection:
            ask(
                connection, self.call(task, {"seconds": 0, "text": KB, "audio": ""})
            ) if task != "words" else first_item(connection, self.call(task))
        return unix(str(next((self.data / "run").glob(f"{task}.*.sock"))))

    def health(self) -> dict:
        with urllib.request.urlopen(f"{self.url}/api/v1/health") as answer:
            return json.load(answer)

    def pid(self, pool: str) -> int:
        with urllib.request.urlopen(f"{self.url}/api/v1/workers") as answer:
            return next(w["pid"] for w in json.load(answer)["workers"] if w["pool"] == pool)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def wait(found: Callable[[], object], patience: float = 60) -> object:
    until = time.monotonic() + patience
    while time.monotonic() < until:
        with contextlib.suppress(OSError, ValueError, KeyError):
            if value := found():
                return value
        time.sleep(0.02)
    raise SystemExit("waited in vain")


@contextlib.contextmanager
def running(argv: list[str], port: int, libs: str | None = None, check: bytes | None = None) -> Iterator[Connect]:
    """Another server, until it answers."""
    env = dict(os.environ)
    if libs:
        env |= {"PYTHONPATH": libs, "PATH": f"{libs}/bin:{env['PATH']}"}
    process = subprocess.Popen(
        [sys.executable, *argv], env=env, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def answers() -> bool:
        with tcp(port)() as connection:
            return check is None or ask(connection, check) > 0

    try:
        wait(answers)
        yield tcp(port)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


# ---- figures


def p50(values: list[float]) -> float:
    return statistics.median(values)


def p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def shown(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def line(what: str, ratio: str, target: str, more: str = "") -> None:
    print(f"{what:62} {ratio:24} {target:12} {more}", flush=True)


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.3g} ms"


def turns(sides: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each side measures in each round; the order changes from round to round."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 else list(sides)[::-1]:
            found[name].append(sides[name]())
    return found


def over(found: dict[str, list[float]], one: str, other: str) -> list[float]:
    return [a / b for a, b in zip(found[one], found[other])]


# ---- the parts


def latency(node: Node, quick: bool, libs: str | None) -> None:
    direct = node.direct("noop")
    with running([str(HERE / "calls_relay.py"), str(path_of(node, "noop")), str(port := free_port())], port) as relay:
        here, there, between = direct(), node.connect(), relay()
        through, own = node.call("noop", NOOP["payload"]), request("/infer", NOOP)
        count = 200 if quick else 500

        def side(connection: socket.socket, data: bytes) -> Callable[[], float]:
            [ask(connection, data) for _ in range(200)]
            return lambda: p50([ask(connection, data) for _ in range(count)])

        sides = {"direct": side(here, own), "gateway": side(there, through), "relay": side(between, own)}
        found = turns(sides, 8 if quick else 20)
    of = ", ".join(f"{name} {p50(v) * 1e6:.0f} us (best {min(v) * 1e6:.0f})" for name, v in found.items())
    line("no-op, 1 KB, 1 client: p50 of the gateway over direct", shown(over(found, "gateway", "direct")), "<= 1.6", of)
    line("  a relay that only copies bytes, over direct", shown(over(found, "relay", "direct")), "")
    line("  the gateway over that relay", shown(over(found, "gateway", "relay")), "")
    direct = node.direct("work")
    for seconds, count, target in ((0.005, 60, "<= 1.10"), (0.05, 10, "<= 1.02")):
        here, there, payload = direct(), node.connect(), {"seconds": seconds, "text": KB}
        calls = {
            "direct": (here, request("/infer", {"payload": payload})),
            "gateway": (there, node.call("work", payload)),
        }
        sides = {name: lambda c=c, d=d, n=count: p50([ask(c, d) for _ in range(n)]) for name, (c, d) in calls.items()}
        found = turns(sides, 4 if quick else 8)
        of = f"{ms(p50(found['direct']))} direct, {ms(p50(found['gateway']))} gateway"
        line(f"{seconds * 1000:g} ms of work: p50 over direct", shown(over(found, "gateway", "direct")), target, of)


def path_of(node: Node, task: str) -> Path:
    return next((node.data / "run").glob(f"{task}.*.sock"))


def throughput(node: Node, quick: bool, libs: str | None) -> None:
    direct = node.direct("noop")
    with contextlib.ExitStack() as stack:
        sides: dict[str, tuple[Connect, bytes]] = {
            "gateway": (node.connect, node.call("noop", NOOP["payload"])),
            "direct": (direct, request("/infer", NOOP)),
        }
        for name, argv, path in others(libs):
            port = free_port()
            data = request(path, NOOP)
            argv = [part.replace("PORT", str(port)) for part in argv]
            sides[name] = (stack.enter_context(running(argv, port, libs, data)), data)
        for clients in (64, 8):
            found = turns(rates(sides, clients, 0.7 if quick else 2.0), 2 if quick else 5)
            targets = {"direct": ">= 0.5" if clients == 64 else "", "seed": ">= 5", "litserve": "> 1"}
            of = ", ".join(f"{name} {p50(v):.0f}/s" for name, v in found.items())
            print(f"no-op, 1 KB, {clients} clients: {of}", flush=True)
            for name in list(sides)[1:]:
                ratios = shown(over(found, "gateway", name))
                line(f"  the gateway over {name}", ratios, targets.get(name, targets.get(name.split()[0], "")))
    direct = node.direct("work")
    payload = {"seconds": 0.005, "text": KB}
    sides = {
        "gateway": (node.connect, node.call("work", payload)),
        "direct": (direct, request("/infer", {"payload": payload})),
    }
    found = turns(rates(sides, 8, 0.7 if quick else 1.5), 2 if quick else 4)
    line("5 ms of work, 8 clients: throughput over direct", shown(over(found, "gateway", "direct")), ">= 0.95")


def rates(sides: dict[str, tuple[Connect, bytes]], clients: int, seconds: float) -> dict[str, Callable[[], float]]:
    return {name: lambda c=connect, d=data: rate(c, clients, d, seconds) for name, (connect, data) in sides.items()}


def others(libs: str | None) -> Iterator[tuple[str, list[str], str]]:
    def there(name: str) -> bool:
        return libs is not None and (Path(libs) / name).exists() or importlib.util.find_spec(name) is not None

    if there("fastapi") and there("uvicorn"):
        yield "seed", [str(HERE / "calls_seed.py"), "PORT"], "/api/noop"
    if there("litserve"):
        yield "litserve", [str(HERE / "calls_litserve.py"), "PORT"], "/predict"
        yield "litserve fast_queue", [str(HERE / "calls_litserve.py"), "PORT", "fast"], "/predict"
    if there("mosec"):
        yield "mosec", [str(HERE / "calls_mosec.py"), "--port", "PORT"], "/inference"


def audio(node: Node, quick: bool, libs: str | None) -> None:
    import base64

    node.direct("audio")
    raw = os.urandom(25_000_000)
    connection = node.connect()

    def as_it_is() -> float:
        return ask(connection, request("/api/v1/calls/audio", raw, "audio/wav"))

    def as_text() -> float:  # the client's own encoding is part of it
        start = time.perf_counter()
        body = {"model": "audio", "payload": {"audio": base64.b64encode(raw).decode()}}
        ask(connection, request("/api/v1/calls/audio", body))
        return time.perf_counter() - start

    found = turns({"raw": as_it_is, "base64": as_text}, 3 if quick else 7)
    of = f"{ms(p50(found['raw']))} raw, {ms(p50(found['base64']))} base64"
    line("25 MB of audio over the same as base64 in JSON", shown(over(found, "raw", "base64")), "<= 0.15", of)


def stream(node: Node, quick: bool, libs: str | None) -> None:
    direct = node.direct("words")
    calls = {
        "direct": (direct(), request("/infer", {"payload": 1})),
        "gateway": (node.connect(), node.call("words", 1)),
    }
    sides = {name: lambda c=c, d=d: p50([first_item(c, d) for _ in range(10)]) for name, (c, d) in calls.items()}
    found = turns(sides, 4 if quick else 10)
    of = f"{ms(p50(found['direct']))} direct, {ms(p50(found['gateway']))} gateway"
    line("first item of a stream (20 ms) over direct", shown(over(found, "gateway", "direct")), "<= 1.05", of)


BARE = """
import time
class Cold:
    def load(self, model_id): ...
    def infer(self, payload): return payload
model = Cold()
model.load("cold")
print(model.infer(1))
"""


def cold(node: Node, quick: bool, libs: str | None) -> None:
    connection = node.connect()

    def first() -> float:
        wait(lambda: node.health()["models"]["cold:cold"]["state"] == "IDLE")
        time.sleep(0.2)
        return ask(connection, node.call("cold", 1))

    def bare() -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", BARE], stdout=subprocess.DEVNULL, check=True)
        return time.perf_counter() - start

    found = turns({"cold": first, "bare": bare}, 6 if quick else 20)
    added = [(a - b) * 1000 for a, b in zip(found["cold"], found["bare"])]
    of = f"{ms(p50(found['cold']))} cold, {ms(p50(found['bare']))} bare"
    shown_ = f"+{p50(added):.0f} ms ({min(added):.0f} to {max(added):.0f})"
    line("first reply of a cold model, less a bare interpreter", shown_, "<= +50 ms", of)


def steady(connection: socket.socket, data: bytes, seconds: float, until: Callable[[], bool] = lambda: False) -> list:
    found, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end and not until():
        found.append(ask(connection, data))
    return found


def loading(node: Node, quick: bool, libs: str | None) -> None:
    node.direct("noop"), node.direct("work")
    connection = node.connect()
    warm = {
        "no-op": node.call("noop", NOOP["payload"]),
        "5 ms of work": node.call("work", {"seconds": 0.005, "text": KB}),
    }
    for how in ("sleeps", "burns"):
        ratios: dict[str, list[float]] = {name: [] for name in warm}
        for _ in range(1 if quick else 2):
            alone = {name: p99(steady(connection, data, 4)) for name, data in warm.items()}
            cause = threading.Thread(
                target=lambda: ask(node.connect(), request("/api/v1/calls/loading", {"model": how, "payload": 1}))
            )
            cause.start()
            wait(lambda: node.health()["models"][f"loading:{how}"]["state"] == "STARTING")
            time.sleep(1)  # its interpreter has started
            beside = {
                name: p99(steady(connection, data, 8, lambda: not cause.is_alive())) for name, data in warm.items()
            }
            if not cause.is_alive():
                raise SystemExit("the load was over too early")
            cause.join()
            for name in warm:
                ratios[name].append(beside[name] / alone[name])
        for name, found in ratios.items():
            what = "waits and copies" if how == "sleeps" else "burns one CPU"
            of = f"{ms(beside[name])} beside, {ms(alone[name])} alone (last round)"
            line(f"{name}: p99 while another loads ({what}) over alone", shown(found), "<= 1.2", of)


def jobs(node: Node, quick: bool, libs: str | None) -> None:
    node.direct("noop"), node.direct("work")
    os.environ["OSTLER_DATA"] = str(node.data)
    sys.path.insert(0, str(HERE))
    import calls_app

    connection = node.connect()
    depths = calls_app.app.producer.store().jobs.depths
    seconds = 2.0 if quick else 3.0

    def left() -> int:
        found = depths().get("bench", {})
        return found.get("queued", 0) + found.get("processing", 0)

    def draining(data: bytes) -> Callable[[], float]:
        def measure() -> float:
            for _ in range(int(70 * seconds)):
                calls_app.nothing.enqueue_many([{}] * 1000)
            found = p99(steady(connection, data, seconds))
            if not left():
                raise SystemExit("the jobs were over too early")
            wait(lambda: not left(), 120)
            return found

        return measure

    def foreign(data: bytes) -> Callable[[], float]:
        def measure() -> float:
            loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
            time.sleep(0.3)
            try:
                return p99(steady(connection, data, seconds))
            finally:
                for process in loops:
                    process.kill()
                    process.wait()

        return measure

    for name, data in (
        ("no-op", node.call("noop", NOOP["payload"])),
        ("5 ms of work", node.call("work", {"seconds": 0.005, "text": KB})),
    ):
        found = turns({"jobs": draining(data), "loops": foreign(data)}, 2 if quick else 5)
        of = f"{ms(p50(found['jobs']))} beside jobs, {ms(p50(found['loops']))} beside loops"
        line(f"{name}: p99 beside a drain over beside two loops", shown(over(found, "jobs", "loops")), "<= 2", of)


def overload(node: Node, quick: bool, libs: str | None, seconds: float = 60.0) -> None:
    node.direct("narrow")
    connection, data = node.connect(), node.call("narrow", {"text": KB})
    alone = steady(connection, data, 2 if quick else 4)
    flood = Flood(node.connect, data, 10 / p50(alone), 256)
    pids = {"plane": node.pid("plane"), "node": node.process.pid}
    memory: dict[str, list[float]] = {name: [] for name in pids}
    flood.run(1)
    flood.accepted.clear(), flood.refused.clear()

    def sample() -> None:
        for name, pid in pids.items():
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            memory[name].append(pages * os.sysconf("SC_PAGESIZE") / 1e6)

    flood.run(seconds, sample)
    asked = len(flood.accepted) + len(flood.refused)
    of = f"{asked / seconds:.0f} calls/s, {len(flood.accepted) / seconds:.0f} accepted, {flood.strange} other, {flood.late} not sent"
    line(f"10 x overload for {seconds:g} s: p99 of rejects", ms(p99(flood.refused)), "<= 5 ms", of)
    of = f"{ms(p99(flood.accepted))} accepted, {ms(p99(alone))} unloaded; one call may wait"
    line("  p99 of accepted calls over unloaded", f"{p99(flood.accepted) / p99(alone):.2f}", "<= 2", of)
    for name, found in memory.items():
        line(
            f"  memory of the {name}: first, last, most",
            f"{found[0]:.1f}, {found[-1]:.1f}, {max(found):.1f} MB",
            "flat",
        )


PARTS = {f.__name__: f for f in (latency, throughput, audio, stream, cold, loading, jobs, overload)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--libs", help="a folder with the other servers' packages")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--overload", type=float, default=60.0, help="seconds of overload")
    parser.add_argument("--pin", type=int, help="keep everything on this core")
    args = parser.parse_args()
    if args.pin is not None:
        os.sched_setaffinity(0, {args.pin})
    print(
        f"load {os.getloadavg()[0]:.1f}, {len(os.sched_getaffinity(0))} cores, Python {sys.version.split()[0]}",
        flush=True,
    )
    node = Node()
    try:
        for name in args.only.split(","):
            if name == "overload":
                overload(node, args.quick, args.libs, args.overload)
            else:
                PARTS[name](node, args.quick, args.libs)
    finally:
        node.close()
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
