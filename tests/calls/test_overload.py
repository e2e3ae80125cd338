"""Ten times what a model can serve: every call is answered, at once with 429 or after its turn with its result, and none is lost."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

from tests.harness import Node, until

APP = """
import time
from ostler import Ostler
app = Ostler()

@app.model("slow", queue=4)
class Slow:
    def load(self, model_id): ...

    def infer(self, payload):
        time.sleep(0.005)
        return payload
"""
CLIENTS, SECONDS = 50, 2.0  # one is served and four wait, so at each moment ten times as many ask


async def ask_on(port: int, name: str, found: list[tuple[str, int, str | None, object]], until: float) -> None:
    """One client, one connection: it asks again as soon as it is answered, and does not heed Retry-After."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    number = 0
    while asyncio.get_running_loop().time() < until:
        number += 1
        body = json.dumps({"model": "slow", "payload": f"{name}-{number}"}).encode()
        head = f"POST /api/v1/calls/slow HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        answer = json.loads(await reader.readexactly(int(headers["content-length"])))
        found.append((f"{name}-{number}", int(lines[0].split()[1]), headers.get("retry-after"), answer))
    writer.close()
    await writer.wait_closed()


def idle(node: Node) -> bool:
    model = node.get("/api/v1/health")[1]["models"]["slow:slow"]
    return (model["in_flight"], model["waiting"]) == (0, 0)


def test_under_overload_every_call_is_answered_and_none_is_lost(make_node, tmp_path: Path) -> None:
    app = tmp_path / "slow_app.py"
    app.write_text(APP)
    node: Node = make_node(app=app)
    port = urlsplit(node.url).port
    assert port is not None
    kind = {"content-type": "application/json"}
    assert node.post("/api/v1/calls/slow", {"payload": 0}, **kind)[0] == 200  # it is loaded
    found: list[tuple[str, int, str | None, object]] = []

    async def flood() -> None:
        until = asyncio.get_running_loop().time() + SECONDS
        await asyncio.gather(*(ask_on(port, f"client{n}", found, until) for n in range(CLIENTS)))

    asyncio.run(asyncio.wait_for(flood(), 60))
    statuses = Counter(status for _, status, _, _ in found)
    assert set(statuses) == {200, 429}, statuses
    assert all(answer["result"] == asked for asked, status, _, answer in found if status == 200)
    assert all(answer["error"]["code"] == "BUSY" for _, status, _, answer in found if status == 429)
    assert all(int(retry or 0) >= 1 for _, status, retry, _ in found if status == 429)
    until(lambda: idle(node), "all places to be free again")
    assert node.post("/api/v1/calls/slow", {"payload": "after"}, **kind)[1]["result"] == "after"
