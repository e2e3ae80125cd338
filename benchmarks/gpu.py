"""Six models of 40 GiB on one GPU that holds three, under load; the same load on seed 003's lock; and a parked model's next call.

    python benchmarks/gpu.py [--calls 300] [--clients 8] [--minutes 8]

Needs an NVIDIA GPU of about 140 GiB and torch; sizes by GPU_BIG_GIB and GPU_PARKED_GIB. Everything is printed as one JSON object a line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from calls_client import ask, request, tcp, unix

HERE = Path(__file__).resolve().parent
SRC = HERE.parent / "src"


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def free_mib() -> int:
    out = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True
    ).stdout
    return int(out.split()[0])


class Node:
    """`ostler up` of gpu_app.py in a directory of its own."""

    def __init__(self, **env: str) -> None:
        self.data = Path(tempfile.mkdtemp(prefix="ostler-gpu-"))
        path = os.pathsep.join(filter(None, [str(SRC), os.environ.get("PYTHONPATH", "")]))
        self.log = (self.data / "log").open("wb")
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ostler",
                "up",
                str(HERE / "gpu_app.py"),
                "--data",
                str(self.data / "d"),
                "--port",
                "0",
            ],
            env={**os.environ, "PYTHONPATH": path, **env},
            stdout=self.log,
            stderr=self.log,
        )
        self.url = ""
        for _ in range(600):
            time.sleep(0.1)
            try:
                self.url = json.loads((self.data / "d" / "node.json").read_text())["url"]
                if self.ask("GET", "/readyz")[0] == 200:
                    return
            except (OSError, ValueError, KeyError):
                pass
            if self.process.poll() is not None:
                break
        raise SystemExit((self.data / "log").read_text()[-4000:])

    def ask(self, method: str, path: str, body: object = None, timeout: float = 300) -> tuple[int, object]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as found:
                return found.status, json.loads(found.read() or b"null")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"null")

    def call(self, task: str, model: str, seed: int) -> tuple[int, object, float]:
        began = time.perf_counter()
        status, found = self.ask("POST", f"/api/v1/calls/{task}", {"model": model, "payload": {"seed": seed}})
        return status, found, time.perf_counter() - began

    def states(self) -> dict:
        return self.ask("GET", "/api/v1/health")[1]["models"]

    def wait(self, model: str, *wanted: str) -> None:
        deadline = time.monotonic() + 120
        while self.states()[model]["state"] not in wanted:
            if time.monotonic() > deadline:
                raise SystemExit(f"{model}: {self.states()[model]}\n" + (self.data / "log").read_text()[-3000:])
            time.sleep(0.02)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        text = (self.data / "log").read_text(errors="replace")
        if out := os.environ.get("OUT"):
            (Path(out) / f"node-{self.process.pid}.log").write_text(text[-200_000:])
        shutil.rmtree(self.data, ignore_errors=True)


def mix(calls: int) -> list[str]:
    """A Zipf mix of six models, the same for both designs."""
    chance = random.Random(9)
    weights = [1 / (rank + 1) ** 1.1 for rank in range(6)]
    return [f"m{chance.choices(range(6), weights)[0]}" for _ in range(calls)]


class Peak(threading.Thread):
    """The largest use of the device, and how many models are there, loading or loaded, while it runs."""

    def __init__(self, node: Node | None) -> None:
        super().__init__(daemon=True)
        self.node, self.mib, self.loaded, self.over = node, 0, [], threading.Event()
        self.start()

    def run(self) -> None:
        while not self.over.wait(0.5):
            self.mib = max(self.mib, free_mib())
            if self.node is not None:
                try:
                    found = self.node.states()
                except OSError:
                    continue
                self.loaded.append(sum(s["workers"] for n, s in found.items() if n.startswith("big:")))


def spread(seconds: list[float]) -> dict[str, float]:
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {f"p{q}": round(ordered[min(len(ordered) - 1, len(ordered) * q // 100)], 3) for q in (50, 90, 99)}


def ours(calls: int, clients: int, seconds: float) -> dict[tuple[str, int], str]:
    node = Node()
    peak = Peak(node)
    todo = list(enumerate(mix(calls)))[::-1]
    lock, took, failed, bits, wrong = threading.Lock(), [], [], {}, 0
    loads: set[tuple[str, int]] = set()
    began = time.perf_counter()

    def client() -> None:
        nonlocal wrong
        while time.perf_counter() - began < seconds:
            with lock:
                if not todo:
                    return
                n, model = todo.pop()
            seed = n % 7
            status, found, spent = node.call("big", model, seed)
            with lock:
                took.append(spent)
                if status != 200:
                    failed.append((status, found))
                    continue
                result = found["result"]
                loads.add((model, result["pid"]))
                wrong += bits.setdefault((model, seed), result["bits"]) != result["bits"]

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    jobs = [node.ask("POST", "/api/v1/jobs", {"task": "multiply", "args": {"n": n}})[1]["id"] for n in (1, 2, 3)]
    for thread in threads:
        thread.join()
    wall = time.perf_counter() - began
    done = []
    for job in jobs:
        deadline = time.monotonic() + 120
        while (row := node.ask("GET", f"/api/v1/jobs/{job}")[1])["status"] in ("queued", "processing"):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        done.append((row["status"], row.get("result")))
    peak.over.set()
    switches = sum(a != b for a, b in zip(mix(calls), mix(calls)[1:]))
    say(
        what="six models, ostler",
        calls=len(took),
        left=len(todo),
        failed=len(failed),
        first_failure=str(failed[:1])[:600],
        wrong=wrong,
        wall_s=round(wall, 1),
        latency_s=spread(took),
        loads=len(loads),
        switches_in_mix=switches,
        peak_mib=peak.mib,
        mean_resident=round(sum(peak.loaded) / max(1, len(peak.loaded)), 2),
        jobs=done,
    )
    node.stop()
    return bits


SEED_WORKER = """
import json, sys
sys.path[:0] = [{src!r}, {here!r}]
import gpu_app
model = gpu_app.Big()
try:
    model.load(sys.argv[1])
except Exception as error:
    print(json.dumps({{"error": type(error).__name__ + ": " + str(error)[:200]}}), flush=True)
    sys.exit(1)
print(json.dumps({{"ready": True}}), flush=True)
for line in sys.stdin:
    print(json.dumps(model.infer(json.loads(line))), flush=True)
"""


def seed(calls: int, clients: int) -> None:
    """Seed 003: one lock over spawn and call, workers that linger for 60 s, no budget. Stops at the first that runs out of memory."""
    workers: dict[str, subprocess.Popen] = {}
    lock, results, todo = threading.Lock(), [], mix(calls)[::-1]

    def one() -> None:
        while True:
            with lock:  # the seed's _gpu_lock
                if not todo or any(r != "ok" for r in results):
                    return
                model = todo.pop()
                process = workers.get(model)
                if process is None:
                    code = SEED_WORKER.format(src=str(SRC), here=str(HERE))
                    process = workers[model] = subprocess.Popen(
                        [sys.executable, "-c", code, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                    )
                    said = json.loads(process.stdout.readline() or '{"error": "died"}')
                    if "error" in said:
                        results.append(f"{model}: {said['error']}")
                        return
                process.stdin.write(json.dumps({"seed": 1}) + "\n")
                process.stdin.flush()
                said = process.stdout.readline()
                results.append("ok" if said else f"{model} died")

    threads = [threading.Thread(target=one) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for process in workers.values():
        process.kill()
        process.wait()
    say(
        what="six models, seed 003's lock",
        calls=len(results),
        resident=len(workers),
        ended_by=[r for r in results if r != "ok"][:1],
    )


def parked(rounds: int = 3) -> None:
    node = Node()
    try:
        _parked(node, rounds)
    finally:
        node.stop()


def _parked(node: Node, rounds: int) -> None:
    cold, woken, warm, same, memory = [], [], [], True, []
    status, first, spent = node.call("parks", "p0", 5)
    if status != 200:
        raise SystemExit(f"{first}\n" + (node.data / "log").read_text()[-3000:])
    for _ in range(rounds):
        assert node.ask("POST", "/api/v1/models/unload", {"task": "parks", "model": "p0"})[0] == 200
        node.wait("parks:p0", "IDLE")
        status, found, spent = node.call("parks", "p0", 5)
        cold.append(spent)
        pid = found["result"]["pid"]
        same &= found["result"]["bits"] == first["result"]["bits"]
        warm.append(min(node.call("parks", "p0", 5)[2] for _ in range(5)))
        node.ask("PATCH", "/api/v1/models", {"task": "parks", "model": "p0", "idle": 0.05})
        node.call("parks", "p0", 5)
        began = time.perf_counter()
        node.wait("parks:p0", "PARKED")
        memory.append({"parked_s": round(time.perf_counter() - began, 2)})
        time.sleep(3.0)  # the copy is made, and the readings are fresh
        memory[-1]["device_mib_while_parked"] = free_mib()
        node.ask("PATCH", "/api/v1/models", {"task": "parks", "model": "p0", "idle": 600})
        status, found, spent = node.call("parks", "p0", 5)
        woken.append(spent)
        same &= status == 200 and found["result"]["bits"] == first["result"]["bits"] and found["result"]["pid"] == pid
    middle = sorted(woken)[rounds // 2] / sorted(cold)[rounds // 2]
    say(
        what="parked",
        gib=float(os.environ.get("GPU_PARKED_GIB", "8")),
        cold_s=[round(s, 2) for s in cold],
        woken_s=[round(s, 2) for s in woken],
        warm_s=[round(s, 4) for s in warm],
        ratio=round(middle, 3),
        same_bits_and_process=same,
        memory=memory,
    )


def warm(rounds: int = 10, calls: int = 100) -> None:
    """A warm model on the GPU, called on a kept connection: through the node over its worker's own socket."""
    node = Node()
    try:
        first = node.call("parks", "p0", 5)[1]["result"]["bits"]
        port = int(node.url.rpartition(":")[2].strip("/"))
        told = {"model": "p0", "payload": {"seed": 5}}
        sides = {
            "direct": (unix(str(next((node.data / "d" / "run").glob("parks.*.sock"))))(), request("/infer", told)),
            "node": (tcp(port)(), request("/api/v1/calls/parks", told)),
        }
        ratios = []
        for _ in range(rounds):  # in turns, so that a slow moment hits both
            p50 = {name: sorted(ask(*side) for _ in range(calls))[calls // 2] for name, side in sides.items()}
            ratios.append(p50["node"] / p50["direct"])
        same = node.call("parks", "p0", 5)[1]["result"]["bits"] == first
    finally:
        node.stop()
    ratios.sort()
    say(
        what="warm",
        p50_ms={name: round(1000 * s, 3) for name, s in p50.items()},
        ratio=[round(ratios[n], 3) for n in (rounds // 2, 0, -1)],
        same_bits=same,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--only", choices=["ours", "seed", "parked", "warm"])
    given = parser.parse_args()
    say(
        what="machine",
        device=subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout.strip(),
        used_mib=free_mib(),
    )
    if given.only in (None, "warm"):
        warm()
    if given.only in (None, "parked"):
        parked()
    if given.only in (None, "seed"):
        seed(given.calls, given.clients)
    if given.only in (None, "ours"):
        ours(given.calls, given.clients, given.minutes * 60)
    say(what="over", used_mib=free_mib())
