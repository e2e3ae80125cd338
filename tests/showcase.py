"""A busy app to look at: five pools, a queue that no worker serves, failures of several kinds, chains, a batch, artifacts, models, sessions.

`fill` gives a node of it 2,000 jobs. `tests/web/test_showcase.py` looks at the pages with it, and `scripts/screenshots` takes their pictures.
"""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import signal
import struct
import time
import wave
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from websockets.asyncio.server import ServerConnection, unix_serve

import ostler
from ostler import Fail, Job, Ostler, Retry

POOLS = ("clips=2", "thumbnails=2", "mail=1", "imports=1", "search-index=1", "exports=0")
HOLD = "hold"  # while a file of this name is in the data directory, what runs goes on running

app = Ostler()
app.queue("mail", rate="200/s")


def _held() -> bool:
    return (Path(os.environ["OSTLER_DATA"]) / HOLD).exists()


# ---- jobs


@app.job(queue="clips", attempts=3, timeout=600)
def cut_clip(job: Job, source: str, start: float = 0.0, end: float = 10.0, stop_at: int = 100) -> dict[str, float]:
    """Reports progress; one with `stop_at` stays there for as long as the showcase is held."""
    for percent, stage in ((5, "fetching"), (30, "cutting"), (62, "encoding"), (88, "uploading")):
        job.progress(percent, stage)
        print(f"[{percent:3d} %] {stage} {source}")
        while percent >= stop_at and _held():
            job.check()
            time.sleep(0.05)
    return {"seconds": end - start}


@app.job(queue="clips", attempts=1, timeout=0.3)
def transcode_to_every_format_that_the_player_knows(job: Job, source: str) -> None:
    """Never in time."""
    job.progress(12, "pass 1 of 2")
    time.sleep(30)


@app.job(queue="thumbnails")
def thumbnail(job: Job, asset: int, width: int = 320) -> str:
    return f"thumbs/{asset}-{width}.webp"


@app.job(queue="thumbnails", attempts=2)
def crashes(job: Job, asset: int) -> None:
    """A decoder that takes its process down."""
    print("decoding", asset)
    os.kill(os.getpid(), signal.SIGSEGV)


@app.job(queue="mail", attempts=5)
def send_mail(job: Job, to: str, template: str) -> str:
    if "nobody" in to:
        raise Fail("BOUNCED", f"550 5.1.1 <{to}>: recipient address rejected: user unknown in virtual mailbox table")
    if "later" in to:
        raise Retry("421 4.7.0 too many connections from this address, try again later", after=1800)
    return "250 2.0.0 Ok: queued"


@app.job(queue="imports", attempts=3)
def import_feed(job: Job, url: str) -> int:
    """Fails with a long message, and one error behind another."""
    job.progress(20, "download")
    body = '{"items": [{"sku": "A-1", "price": 1.0}, ' + '{"sku": "B-2", "price": }, ' * 12
    try:
        return len(json.loads(body))
    except ValueError as error:
        raise RuntimeError(f"the feed {url} cannot be read: {error}; it begins with {body}") from error


@app.job(queue="search-index", at_once=1, per="customer")
def rebuild_search_index_for_customer_catalogue(job: Job, customer: str, full: bool = False) -> dict[str, Any]:
    time.sleep(0.02)
    return {"customer": customer, "documents": 1200 + job.id, "full": full}


@app.job(queue="exports")
def export_orders(job: Job, month: str) -> None: ...


@app.job(queue="search-index")
def fetch(job: Job, url: str) -> str:
    return f"fetched/{url.rpartition('/')[2]}"


@app.job(queue="search-index", attempts=1)
def check(job: Job, path: str, ok: bool = True) -> str:
    if not ok:
        raise ValueError(f"{path} is not a video: moov atom not found")
    return path


@app.job(queue="search-index")
def announce(job: Job, path: str) -> str:
    return f"announced {path}"


@app.job(queue="mail")
def tell(job: Job, summary: dict[str, int]) -> str:
    return f"{summary['total'] - summary['failed']} of {summary['total']} are there"


@app.job(queue="clips", attempts=2)
def render_report(job: Job, title: str) -> list[str]:
    """Artifacts of many types."""
    if job.attempt == 1:
        raise ConnectionResetError("the storage closed the connection after 3 of 9 parts")
    keys = []
    for name, content in artifacts(title).items():
        (job.scratch / name).write_bytes(content)
        job.publish(job.scratch / name, f"{job.id}/{name}")
        keys.append(f"{job.id}/{name}")
    return keys


@app.job(queue="imports")
def plan(job: Job) -> dict[str, int]:
    """Stores two chains, of which one breaks, and a batch."""
    path = "https://cdn.example.com/raw/keynote.mov"
    whole, broken = (
        fetch.s(url=path).then(check.s(ok=ok), into="path").then(announce.s(), into="path") for ok in (True, False)
    )
    batch = app.batch([thumbnail.s(asset=n) for n in range(8)], then=tell.s(), into="summary")
    return {"chain": int(whole.enqueue()), "broken chain": int(broken.enqueue()), "batch": int(batch.jobs[0])}


app.cron("nightly report", "0 3 * * *", render_report.s(title="Last night"), zone="Europe/Berlin")
app.cron("refresh prices", "*/5 * * * *", import_feed.s(url="https://prices.example/feed.json"))
app.cron("index", "15 */2 * * mon-fri", rebuild_search_index_for_customer_catalogue.s(customer="acme", full=True))


def artifacts(title: str) -> dict[str, bytes]:
    """Files by name."""
    text = "\n".join(f"2026-11-{day:02d}  {title}  {day * 37 % 101:3d} orders" for day in range(1, 29))
    return {
        "chart.png": png(640, 240),
        "summary.txt": text.encode(),
        "figures.json": json.dumps({"title": title, "orders": [day * 37 % 101 for day in range(1, 29)]}).encode(),
        "orders.csv": b"day,orders\n" + b"".join(b"%d,%d\n" % (d, d * 37 % 101) for d in range(1, 29)),
        "report.html": b"<h1>Report</h1><script>parent.hacked = 1</script>",
        "logo.svg": b"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 64 64'><script>window.hacked = 1</script>"
        b"<path d='M16 54a24 24 0 1 1 32 0' fill='none' stroke='#96501a' stroke-width='10'/></svg>",
        "jingle.wav": wav(),
        "model-weights-with-a-rather-long-name-and-no-known-type.bin": bytes(70_000),
    }


def png(width: int, height: int) -> bytes:
    """A picture with bars in it."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    tall = [int(height * (0.25 + 0.6 * abs(math.sin(n * 0.7)))) for n in range(width // 20 + 1)]
    rows = bytearray()
    for y in range(height):
        rows.append(0)
        for x in range(width):
            inside = x % 20 < 14 and height - y < tall[x // 20]
            rows += b"\x1f\x5f\x9e" if inside else b"\xf5\xf3\xef"
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(rows))) + chunk(b"IEND", b"")
    )


def wav() -> bytes:
    """Half a second of a tone."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(b"".join(struct.pack("<h", int(9000 * math.sin(n / 3))) for n in range(4000)))
    return out.getvalue()


# ---- models


@app.model("caption", models=["small", "large"], memory_mb=40)
class Caption:
    def load(self, model_id: str) -> None:
        print("loaded", model_id, flush=True)

    def infer(self, payload: Any) -> Any:
        if payload == "broken":
            raise ValueError("the picture is not one: unknown image format")
        while payload == "long" and _held() and not ostler.cancelled():
            time.sleep(0.02)
        return {"caption": "a horse in its stable", "score": 0.93}


# ---- sessions


async def _echo(connection: ServerConnection) -> None:
    async for message in connection:
        await connection.send(message)


@app.sessions("chromium", workers=2, slots=4, lifetime=50, line=10)
class Chromium:
    async def start(self, worker: Any) -> str:
        self.server = await unix_serve(_echo, worker.socket)
        return str(worker.socket)

    async def open(self, session: Any) -> None: ...

    async def view(self, session: Any) -> AsyncIterator[bytes]:
        picture = Path(os.environ["OSTLER_DATA"]) / "view.jpg"
        while picture.exists():
            yield picture.read_bytes()
            await asyncio.sleep(0.5)


# ---- filling it


def fill(node: Any, jobs: int = 2000) -> dict[str, int]:
    """Give a node of this app its jobs, and wait until all have run that will; ids of some to look at, by a name."""
    (node.folder / HOLD).touch()
    history(node)
    found: dict[str, int] = node.wait_job(node.enqueue("plan"))["result"]
    found["artifacts"] = node.enqueue("render_report", title="October 2026")
    found["long error"] = node.enqueue(
        "import_feed", url="https://feeds.example.com/catalogue/eu-central/products.json"
    )
    found["crash"] = node.enqueue("crashes", asset=77)
    found["timeout"] = node.enqueue("transcode_to_every_format_that_the_player_knows", source="talks/keynote.mov")
    some = [node.enqueue("send_mail", to=f"nobody{n}@example.com", template="welcome") for n in range(12)]
    some += [node.enqueue("import_feed", url=f"https://feeds.example.com/{n}.json") for n in range(6)]
    found["bounced"] = some[0]
    found["waits for its retry"] = node.enqueue("send_mail", to="later@example.com", template="invoice")
    found["stalled"] = node.enqueue("export_orders", month="2026-09")
    many = [{"task": "thumbnail", "args": {"asset": n}} for n in range(jobs * 6 // 10)]
    many += [
        {"task": "send_mail", "args": {"to": f"user{n}@example.com", "template": "digest"}} for n in range(jobs // 4)
    ]
    names = ("acme", "globex", "initech", "umbrella")
    many += [
        {"task": "rebuild_search_index_for_customer_catalogue", "args": {"customer": names[n % 4]}} for n in range(40)
    ]
    many += [{"task": "cut_clip", "args": {"source": f"talks/{n}.mp4"}} for n in range(60)]
    many += [{"task": "export_orders", "args": {"month": f"2026-{n + 1:02d}"}} for n in range(8)]
    many += [
        {"task": "send_mail", "args": {"to": f"u{n}@example.com", "template": "reminder"}, "delay": 7200}
        for n in range(30)
    ]
    many += [{"task": "export_orders", "args": {"month": f"2025-{n + 1:02d}"}} for n in range(3)]
    stored = node.post("/api/v1/jobs/bulk", {"jobs": many})[1]["ids"]
    node.post("/api/v1/jobs/cancel", {"ids": stored[-3:]})
    for job in [*found.values(), *some]:
        if job not in (found["stalled"], found["waits for its retry"]):
            node.wait_job(job, patience=180)
    found["running"] = node.enqueue("cut_clip", source="talks/keynote-2026-closing-remarks.mp4", stop_at=62)
    node.enqueue("cut_clip", source="talks/panel.mp4", stop_at=30)
    _settled(node)
    for n in range(120):
        node.post("/api/v1/jobs", {"task": "cut_clip", "args": {"source": f"queue/{n}.mp4"}})
    return found


def _settled(node: Any) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        queues = node.get("/api/v1/info")[1]["queues"]
        if (
            not any(n["queued"] for name, n in queues.items() if name != "exports")
            and queues["clips"]["processing"] == 2
        ):
            return
        time.sleep(0.1)
    raise AssertionError(f"the showcase is not at rest: {queues}")


def history(node: Any) -> None:
    """Counters of the last hour, so that the plots have something to show."""
    from ostler.store import now_ms
    from ostler.store.live import bin_of

    now = now_ms()
    with node.open_store() as store, store.db.transaction():
        for n in range(2, 360):
            at = now - n * 10_000
            busy = 0.5 + 0.5 * math.sin(n / 23)
            for queue, most, ms in (("thumbnails", 900, 40), ("mail", 240, 9), ("clips", 140, 4200)):
                done = int(most * (0.3 + busy)) + n * 7 % 25
                failed = 1 if queue == "mail" and n % 29 == 0 else 0
                took = int(ms * (1 + 0.5 * math.sin(n / 40)))
                counts = {
                    "done": done,
                    "run_ms": done * took,
                    f"run:{bin_of(took)}": done,
                    f"wait:{bin_of(took // 3 + 1)}": done,
                }
                store.live.tallies.add({(queue, k): v for k, v in {**counts, "failed": failed}.items() if v}, at)


def visitors(node: Any, count: int = 6) -> Iterator[Any]:
    """Clients that have a session each."""
    from websockets.sync.client import connect

    for n in range(count):
        yield connect(f"ws{node.url[4:]}/sessions/chromium", user_agent_header=f"Playwright/1.65 (client {n})")
