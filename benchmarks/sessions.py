"""Sessions: what the relay, admission, recycling and the browser grid cost, beside the worker's own socket. One run prints one table.

    python benchmarks/sessions.py [--only roundtrip,connect,…] [--quick] [--chromium PATH]

All figures are ratios within this run. The sides take turns in short rounds, so that a slow moment of the machine hits all of them;
printed is the median of the rounds' ratios, and in brackets the lowest and the highest. Client, node, plane, worker and browser share
the cores. `--chromium` names a full Chromium, for its memory beside the headless shell's.

    roundtrip   `page.evaluate("1")` through the relay over direct, which is the same browser server on TCP, as clients reach Playwright's
                own; beside it the worker's own (Unix) socket, redirect, a relay that only copies bytes and one with the library websockets
    connect     connect through the node (who is it, which worker, a row in the registry) over direct, with each registry
    short       sessions a second, four at once: connect, new_context, new_page, goto, title, close. Over direct, and over a browser each
    relay       CPU of the plane for a message of 300 bytes there and back, over a relay written with the library websockets
    memory      of each open session with a small page: headless shell over full Chromium
    recycling   capacity lost to recycling: simulated beside the seed's policy, and measured in a pool with short lives
    told        freed slot → waiting client; order → effect; death of a worker or hang of a browser → its client is told; selection
    beside      a no-op call and jobs beside 50 sessions that talk, and their messages beside a flood of jobs
    held        500 echo sessions and 150 of Chromium, each used once a second
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import sessions_browsers as with_browsers
from calls import free_port, line, ms, over, p50, p99, running, shown, turns
from calls_client import ask, request
from sessions_node import HERE, Client, Node, Refused, cpu, opened, rss_mb
from sessions_recycling import Case, Ours, Seed


def echo(**options: object) -> dict:
    return {"kind": "echo", "workers": 1, "slots": 50, "lifetime": 0, **options}


# ---- what the relay costs


def relay(quick: bool) -> None:
    with Node({"echo": echo()}) as node, contextlib.ExitStack() as stack:
        sides = {"plane": (node.connect, "/sessions/echo", node.plane)}
        for name, more in (("websockets", []), ("websockets on uvloop", ["uvloop"])):
            port = free_port()
            argv = [str(HERE / "sessions_relay.py"), node.path("echo"), str(port), *more]
            connect = stack.enter_context(running(argv, port))
            sides[name] = (connect, "/", listening(port))
        port = free_port()
        copies = stack.enter_context(running([str(HERE / "calls_relay.py"), node.path("echo"), str(port)], port))
        sides["copies bytes"] = (copies, "/", listening(port))
        count = 300 if quick else 1000
        clients = {name: Client(connect, path).opened() for name, (connect, path, _) in sides.items()}

        def spent(name: str) -> float:
            before = cpu(sides[name][2])
            for _ in range(count):
                clients[name].echo()
            return (cpu(sides[name][2]) - before) / count

        for client in clients.values():
            [client.echo() for _ in range(200)]
        found = turns({name: lambda n=name: spent(n) for name in sides}, 4 if quick else 10)
        times = turns({name: lambda c=c: p50([c.echo() for _ in range(200)]) for name, c in clients.items()}, 4)
        own = Client(node.own("echo")).opened()
        direct = p50([own.echo() for _ in range(400)])
    of = ", ".join(f"{name} {p50(v) * 1e6:.0f} us" for name, v in found.items())
    targets = {"websockets": "<= 0.33"}
    for name in list(sides)[1:]:
        what = f"CPU of the plane for 300 bytes there and back, over {name}"
        line(what, shown(over(found, "plane", name)), targets.get(name, ""), of if name == "websockets" else "")
    of = ", ".join(f"{name} {p50(v) * 1e6:.0f} us" for name, v in times.items())
    line(
        "  p50 of that message, over a relay that copies bytes",
        shown(over(times, "plane", "copies bytes")),
        "",
        f"{of}, direct {direct * 1e6:.0f} us",
    )


def listening(port: int) -> int:
    """The process that listens there."""
    wanted = f"{port:04X}"
    inode = next(
        x.split()[9]
        for x in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if x.split()[1].endswith(wanted) and x.split()[3] == "0A"
    )
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(entry) == f"socket:[{inode}]":
                return int(entry.parts[2])
    raise SystemExit(f"nobody listens on {port}")


# ---- admission


@contextlib.contextmanager
def registries():
    """A node's settings for each registry that can be had here."""
    with contextlib.ExitStack() as stack:
        found = {"SQLite": {}}
        with contextlib.suppress(ImportError, LookupError):
            from tests.servers import Server as Postgres

            server = Postgres(fsync="on").start()
            stack.callback(server.close)
            found["PostgreSQL"] = {"OSTLER_STORE": server.url(server.create_database())}
        with contextlib.suppress(ImportError, LookupError):
            from tests.sessions.valkey import Server as Valkey

            valkey = Valkey().start()
            stack.callback(valkey.close)
            found["Valkey"] = {"OSTLER_REGISTRY": valkey.url}
        yield found


def connect(quick: bool) -> None:
    with registries() as found:
        for name, env in found.items():
            with Node({"echo": echo(), "chromium": with_browsers.chromium()}, **env) as node:
                _raw_connect(node, name, quick)
                with_browsers.connect(node, name, quick)
                asyncio.run(_turns(node, name, quick))


def _raw_connect(node: Node, name: str, quick: bool) -> None:
    port = free_port()
    count, plane = 10, node.plane
    with running([str(HERE / "calls_relay.py"), node.path("echo"), str(port)], port) as copies:
        sides = {
            "direct": lambda: p50([opened(node.own("echo")) for _ in range(count)]),
            "copies": lambda: p50([opened(copies) for _ in range(count)]),
            "node": lambda: p50([opened(node.connect, "/sessions/echo") for _ in range(count)]),
        }
        before = cpu(plane), cpu(node.process.pid)
        took = turns(sides, 10 if quick else 50)
        spent = [
            (now - then) / (count * len(took["node"])) for now, then in zip((cpu(plane), cpu(node.process.pid)), before)
        ]
    of = ", ".join(f"{side} {ms(p50(v))} (best {ms(min(v))})" for side, v in took.items())
    of += f"; CPU for connect and close: plane {spent[0] * 1e6:.0f}, node {spent[1] * 1e6:.0f} us"
    added = [(a - b) * 1000 for a, b in zip(took["node"], took["copies"])]
    line(
        f"{name}: an echo session's connect, less one by a relay that copies",
        f"+{p50(added):.2f} ms ({min(added):.2f} to {max(added):.2f})",
        "",
        of,
    )


async def _turns(node: Node, name: str, quick: bool) -> None:
    """The registry alone, from a process of its own: one session is over, the next one is admitted."""
    from types import SimpleNamespace

    from tests.sessions.registries import RedisBackend, StoreBackend, asks, over, worker

    store, registry = node.env.get("OSTLER_STORE", "sqlite"), node.env.get("OSTLER_REGISTRY")
    backend = (
        StoreBackend(store, node.data) if registry is None else RedisBackend(SimpleNamespace(url=registry), node.data)
    )
    own, found = await backend.node(), []
    await own.announce(worker(slots=50, lifetime=0))
    for number in range(150 if quick else 500):
        ended = [over(str(number - 1))] if number else []
        start = time.perf_counter()
        (verdict,) = await own.turn(ended, [asks(str(number))])
        found.append(time.perf_counter() - start)
        assert verdict.ok, verdict
    await backend.close_nodes()
    backend.close()
    line(f"  {name}: the registry's turn alone", f"p50 {ms(p50(found))}, p99 {ms(p99(found))}", "")


# ---- recycling


def recycling(quick: bool) -> None:
    for load, mean in ((0.6, 2.0), (0.6, 20.0), (0.8, 2.0), (0.8, 20.0)):
        case = Case(load, mean, sessions=5000 if quick else 40_000)
        seed, own = Seed(case).run(), Ours(case).run()
        of = (
            f"lost {own.lost:.2%} beside {seed.lost:.1%}; two out {own.two_out:.2%} beside {seed.two_out:.1%} of the time; "
            f"wait p99 {own.wait_p99:.2f} beside {seed.wait_p99:.1f} s; ended by the drain limit {own.killed:.2%} beside {seed.killed:.2%}"
        )
        line(
            f"simulated, load {load}, sessions of {mean:g} s: capacity lost",
            f"{own.lost / seed.lost:.3f}",
            "<= 0.10",
            of,
        )
    _recycled(quick)


def _recycled(quick: bool) -> None:
    """A real pool: 4 workers of 5 slots that live for 50 sessions, used at 0.6 of their slots."""
    mean, load, seconds = 0.5, 0.6, 20 if quick else 60
    pool = echo(workers=4, slots=5, lifetime=50, margin=5, drain=30.0)
    ended = {"fine": 0, "refused": 0, "cut": 0}
    starts: list[float] = []
    with Node({"pool": pool}) as node:
        chance, until, threads = random.Random(1), time.monotonic() + seconds, []

        def session(length: float) -> None:
            try:
                client = Client(node.connect, "/sessions/pool").opened()
                time.sleep(length)
                client.echo()
                client.leave()
                ended["fine"] += 1
            except Refused:
                ended["refused"] += 1
            except (OSError, EOFError, SystemExit):
                ended["cut"] += 1

        lost: list[tuple[float, int]] = []  # seconds, slots that take sessions

        def sample() -> None:
            last, seen = time.monotonic(), {}
            while time.monotonic() < until:
                found = node.capacity("pool")
                now = time.monotonic()
                serving = sum(w["serves"] and w["served"] < w["lifetime"] for w in found["workers"])
                lost.append((now - last, serving))
                for worker in found["workers"]:
                    key = worker["component"], worker["generation"]
                    if worker["status"] == "starting":
                        seen.setdefault(key, now)
                    elif key in seen:
                        starts.append(now - seen.pop(key))
                last = now
                time.sleep(0.02)

        sampler = threading.Thread(target=sample)
        sampler.start()
        while time.monotonic() < until:
            thread = threading.Thread(target=session, args=(chance.expovariate(1 / mean),))
            thread.start()
            threads.append(thread)
            time.sleep(chance.expovariate(load * 20 / mean))
        for thread in (*threads, sampler):
            thread.join()
        recycled = sum(w["generation"] - 1 for w in node.capacity("pool")["workers"])
    share = sum(t * max(0, 4 - n) for t, n in lost) / (4 * sum(t for t, _ in lost))
    start = p50(starts) if starts else 0.2
    seed = Seed(
        Case(load, mean, restart=start, beat=2.5, drain=7.5, sessions=5000)
    ).run()  # all in a quarter of the time
    of = (
        f"{share:.2%} lost in {seconds} s, {recycled} workers replaced (start {start:.2f} s), {ended['fine']} sessions, "
        f"{ended['refused']} refused, {ended['cut']} cut; the seed's policy with that start, sessions of 0.5 s and beats of 2.5 s: {seed.lost:.1%}"
    )
    line(
        "a real pool with short lives: capacity lost, over the seed simulated",
        f"{share / seed.lost:.3f}",
        "<= 0.10",
        of,
    )


# ---- who is told, and when


def told(quick: bool) -> None:
    rounds = 40 if quick else 200
    pools = {"one": echo(slots=1), "echo": echo(slots=5), "crash": echo(slots=5)}
    with Node(pools, OSTLER_STORE="sqlite") as node:
        _freed(node, rounds)
        _killed(node, rounds)
        _drained(node, 10 if quick else 30)
        _crashed(node, 8 if quick else 30)
    _selection()
    with_browsers.broken(quick)


def report(what: str, found: list[float], target: str, more: str = "") -> None:
    line(
        what,
        f"p50 {ms(p50(found))}, p99 {ms(p99(found))}",
        target,
        f"{len(found)} times; longest {ms(max(found))} {more}",
    )


def _freed(node: Node, rounds: int) -> None:
    """The first one's close frame is sent → the one who waits has its 101."""
    found, alone = [], []
    held = Client(node.connect, "/sessions/one").opened()
    for _ in range(rounds):
        waiting = Client(node.connect, "/sessions/one")
        time.sleep(0.01)  # until it is in line
        start = time.perf_counter()
        held.socket.sendall(bytes.fromhex("8882 00000000 03e8"))
        waiting.opened()
        found.append(time.perf_counter() - start)
        held.socket.close()
        held = waiting
    held.leave()
    for _ in range(rounds):
        alone.append(opened(node.connect, "/sessions/one"))
    report(
        "freed slot → waiting client has its session",
        found,
        "p99 <= 10 ms",
        f"(a connect without waiting: p50 {ms(p50(alone))}, p99 {ms(p99(alone))})",
    )


def _killed(node: Node, rounds: int) -> None:
    import http.client

    found, api = [], http.client.HTTPConnection("127.0.0.1", node.port)
    for _ in range(rounds):
        client = Client(node.connect, "/sessions/echo").opened()
        client.echo()
        start = time.perf_counter()
        api.request("DELETE", f"/api/v1/sessions/{client.id}")
        client.closed()
        found.append(time.perf_counter() - start)
        api.getresponse().read()
        client.socket.close()
    report("DELETE of a session → its client has the close frame", found, "p99 <= 100 ms")


def _drained(node: Node, rounds: int) -> None:
    """The order is sent → no session is given to that worker any more; then its replacement is waited for."""
    found = []
    for _ in range(rounds):
        ordered = threading.Event()
        node.wait_for("echo")
        start = time.perf_counter()
        order = threading.Thread(target=lambda: (node.ask("/api/v1/pools/echo/pause", "POST"), ordered.set()))
        order.start()
        while True:
            try:
                asked = time.perf_counter()
                Client(node.connect, "/sessions/echo?wait=0").opened().leave()
            except Refused:
                found.append(asked - start)
                break
        order.join()
        node.ask("/api/v1/pools/echo/resume", "POST")
    report("order to a pool to take no sessions → the first that is refused", found, "p99 <= 100 ms")


def _crashed(node: Node, rounds: int) -> None:
    found, back = [], []
    for _ in range(rounds):
        node.wait_for("crash")
        client = Client(node.connect, "/sessions/crash").opened()
        client.echo()
        pid = node.pid("worker:crash:0")
        start = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        text = client.closed()
        found.append(time.perf_counter() - start)
        if "died" not in text:
            raise SystemExit(f"the client was told {text!r}")
        client.socket.close()
        Client(node.connect, "/sessions/crash").opened().leave()
        back.append(time.perf_counter() - start)
    report("SIGKILL of a worker → its client has the close frame", found, "")
    report("  → the next session, for which a new worker is started", back, "")


def _selection() -> None:
    """Slots of 1,000 workers: a session asked for and ended, in memory."""
    from ostler.sessions.selection import Worker
    from ostler.sessions.slots import Slots

    slots = Slots()
    slots.learn({"pool": {"margin": 5, "line": 100, "line_wait": 30.0, "paused": False}})
    group = slots.groups["pool"]
    chance = random.Random(1)
    for number in range(1000):
        worker = Worker(f"worker:{number}", 1, "pool", 5, 50, served=chance.randrange(40), in_use=chance.randrange(4))
        slots.up(worker, 0.0)

    class Ticket:
        owner, priority, version, pool, number = "somebody", 0, "1.65.0", None, 0
        deadline, asked = 1e9, 0.0

        def __init__(self) -> None:
            self.excluded: set = set()

    found, live = [], []
    for _ in range(20_000):
        ticket = Ticket()
        start = time.perf_counter()
        worker = slots.ask(group, ticket, 0.0)
        found.append(time.perf_counter() - start)
        live.append(worker)
        if len(live) > 1000:
            ended = live.pop(chance.randrange(len(live)))
            ended.served -= 1
            slots.done(ended, "somebody", 0.0)
    line(
        "selection among 1,000 workers",
        f"p50 {p50(found) * 1e6:.1f} us, p99 {p99(found) * 1e6:.1f} us",
        "<= 100 us",
        "the seed's, in Redis: 2.44 ms",
    )


# ---- beside jobs and calls


TALK = """
import select, sys, time
sys.path.insert(0, {here!r})
from calls_client import tcp, unix
from sessions_node import Client, MESSAGE
connect = unix({path!r}) if {path!r} else tcp({port})
clients = [Client(connect, {target!r}).opened() for _ in range({count})]
by = {{c.socket.fileno(): c for c in clients}}
poll = select.epoll()
for c in clients:
    poll.register(c.socket, select.EPOLLIN)
print("ready", flush=True)
sys.stdin.readline()
took, sent, start = [], {{}}, time.perf_counter()
gap, due, turn = 1 / {rate}, start, 0
while (now := time.perf_counter()) < start + {seconds} or sent:
    while due <= now < start + {seconds}:
        c = clients[turn % len(clients)]
        turn, due = turn + 1, due + gap
        if c.socket.fileno() not in sent:
            sent[c.socket.fileno()] = time.perf_counter()
            c.socket.sendall(MESSAGE)
    for number, _ in poll.poll(max(0.0, min(0.05, due - time.perf_counter()))):
        by[number].frame()
        took.append(time.perf_counter() - sent.pop(number))
took.sort()
print(len(took), took[len(took) // 2], took[int(len(took) * 0.99)], flush=True)
"""


class Talk:
    """50 sessions that exchange messages at a fixed rate, from a process of its own; through the relay, or straight to the worker."""

    def __init__(self, node: Node, seconds: float, *, direct: bool = False, count: int = 50, rate: int = 1000) -> None:
        path = node.path("echo") if direct else ""
        target = "/" if direct else "/sessions/echo"
        code = TALK.format(
            here=str(HERE), path=path, port=node.port, target=target, count=count, rate=rate, seconds=seconds
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout.readline() == "ready\n"

    def go(self) -> None:
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def done(self) -> tuple[int, float, float]:
        count, middle, late = self._process.communicate()[0].split()
        return int(count), float(middle), float(late)


def beside(quick: bool) -> None:
    seconds = 2.0 if quick else 4.0
    rounds = 3 if quick else 7
    with Node({"echo": echo(slots=100)}) as node:
        connection = node.connect()
        data = request("/api/v1/calls/noop", {"model": "noop", "payload": {"text": "x" * 1000}})
        [ask(connection, data) for _ in range(300)]

        def calls() -> list[float]:
            found, until = [], time.perf_counter() + seconds
            while time.perf_counter() < until:
                found.append(ask(connection, data))
                time.sleep(0.002)
            return found

        def with_talk(direct: bool, work):
            talk = Talk(node, seconds, direct=direct)
            talk.go()
            found = work()
            talk.done()
            return found

        sides = {"alone": calls, "relayed": lambda: with_talk(False, calls), "direct": lambda: with_talk(True, calls)}
        found = turns(sides, rounds)
        for name, figure in (("p50", p50), ("p99", p99)):
            values = {side: [figure(v) for v in rounds_] for side, rounds_ in found.items()}
            of = ", ".join(f"{side} {ms(p50(v))}" for side, v in values.items())
            line(
                f"no-op call, {name}: beside 50 sessions with 1,000 messages/s, over alone",
                shown(over(values, "relayed", "alone")),
                "",
                of,
            )
            line(
                "  over beside the same messages without the relay", shown(over(values, "relayed", "direct")), "<= 1.2"
            )
        jobs = Jobs(node)
        _jobs(jobs, rounds, with_talk)
        _messages(node, jobs, seconds, rounds)


def _jobs(jobs: Jobs, rounds: int, with_talk) -> None:
    def drain() -> float:
        return jobs.drain(15_000)

    sides = {"alone": drain, "relayed": lambda: with_talk(False, drain), "direct": lambda: with_talk(True, drain)}
    found = turns(sides, rounds)
    of = ", ".join(f"{side} {p50(v):.0f}/s" for side, v in found.items())
    line("no-op jobs a second: beside these sessions, over alone", shown(over(found, "relayed", "alone")), "", of)
    line("  over beside the same messages without the relay", shown(over(found, "relayed", "direct")), ">= 0.9")


class Jobs:
    """No-op jobs of the node, stored from here."""

    def __init__(self, node: Node) -> None:
        os.environ["OSTLER_DATA"] = str(node.data)
        sys.path.insert(0, str(HERE))
        import sessions_app

        self._node, self._task, self._depths = node, sessions_app.nothing, sessions_app.app.producer.store().jobs.depths

    def store(self, count: int) -> None:
        for _ in range(count // 1000):
            self._task.enqueue_many([{}] * 1000)

    def left(self) -> int:
        found = self._depths().get("bench", {})
        return found.get("queued", 0) + found.get("processing", 0)

    def drain(self, count: int) -> float:
        """Stored while the pool is paused, then run; jobs a second."""
        self._node.ask("/api/v1/pools/bench/pause", "POST")
        self.store(count)
        start = time.perf_counter()
        self._node.ask("/api/v1/pools/bench/resume", "POST")
        while self.left():
            time.sleep(0.005)
        return count / (time.perf_counter() - start)

    @contextlib.contextmanager
    def flood(self):
        """There is always something to run."""
        stop = threading.Event()

        def fill() -> None:
            while not stop.is_set():
                self.store(10_000) if self.left() < 20_000 else time.sleep(0.05)

        thread = threading.Thread(target=fill)
        thread.start()
        while not self.left():
            time.sleep(0.01)
        try:
            yield
        finally:
            stop.set()
            thread.join()
            while self.left():
                time.sleep(0.02)


def _messages(node: Node, jobs: Jobs, seconds: float, rounds: int) -> None:
    """A paced set of sessions, alone, beside a flood of jobs, and beside two foreign busy loops."""

    def alone() -> float:
        talk = Talk(node, seconds, rate=200)
        talk.go()
        return talk.done()[2]

    def flooded() -> float:
        with jobs.flood():
            return alone()

    def burnt() -> float:
        burning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
        try:
            return alone()
        finally:
            for process in burning:
                process.kill()
                process.wait()

    found = turns({"alone": alone, "jobs": flooded, "foreign": burnt}, rounds)
    of = ", ".join(f"{side} {ms(p50(v))}" for side, v in found.items())
    line("message of a session, p99: beside a flood of jobs, over alone", shown(over(found, "jobs", "alone")), "", of)
    line("  over beside two foreign busy loops", shown(over(found, "jobs", "foreign")), "<= 1")


# ---- many at once


def held(quick: bool) -> None:
    count, seconds = (100, 10) if quick else (500, 60)
    with Node({"echo": echo(workers=2, slots=count // 2)}) as node:
        plane = node.plane
        before = rss_mb(plane), rss_mb(node.process.pid)
        talk = Talk(node, seconds, count=count, rate=count)
        with_all = rss_mb(plane), rss_mb(node.process.pid)
        start, clock = cpu(plane), time.perf_counter()
        talk.go()
        messages, middle, late = talk.done()
        spent = (cpu(plane) - start) / (time.perf_counter() - clock)
        after = rss_mb(plane), rss_mb(node.process.pid)
    of = (
        f"plane {before[0]:.1f} MB without, {with_all[0]:.1f} with them, {after[0]:.1f} at the end ({(with_all[0] - before[0]) / count * 1024:.1f} kB each); "
        f"node {before[1]:.1f}, {with_all[1]:.1f}, {after[1]:.1f}; plane {spent:.1%} of a core; message p50 {ms(middle)}, p99 {ms(late)}"
    )
    missed = count * seconds - messages
    line(
        f"{count} echo sessions, a message each second for {seconds} s: not answered in time",
        f"{missed} of {count * seconds}",
        "0",
        of,
    )
    with_browsers.held(quick)


PARTS = {
    "roundtrip": with_browsers.roundtrip,
    "connect": connect,
    "short": with_browsers.short,
    "relay": relay,
    "memory": with_browsers.memory,
    "recycling": recycling,
    "told": told,
    "beside": beside,
    "held": held,
}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--only", default=",".join(PARTS))
    options.add_argument("--quick", action="store_true")
    options.add_argument("--chromium", help="the program of a full Chromium")
    given = options.parse_args()
    with_browsers.FULL = given.chromium or with_browsers.FULL
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores", flush=True)
    for name in given.only.split(","):
        start = time.monotonic()
        PARTS[name](given.quick)
        print(f"  [{name}: {time.monotonic() - start:.0f} s, load average {os.getloadavg()[0]:.1f}]", flush=True)


if __name__ == "__main__":
    main()
