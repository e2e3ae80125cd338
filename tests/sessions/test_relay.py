"""Sessions through the plane: connect, bytes both ways, and one reason for each end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plane.serving import run
from tests.sessions.planes import FakeNode, session_of, until


@pytest.fixture
def node(tmp_path: Path) -> FakeNode:
    return FakeNode(tmp_path)


def test_a_client_is_relayed_to_a_worker_and_its_end_is_told(node: FakeNode) -> None:
    async def main() -> None:
        async with node.running():
            node.pool()
            await node.worker()
            async with node.connect(compression=None) as client:
                for message in ("hello", "", b"\x00\x01", "x" * 70_000, b"y" * 1_000_000):
                    await client.send(message)
                    assert await client.recv() == message
                assert [admitted[0] for admitted in node.of("admit")] == [session_of(client)]
                assert node.in_use() == 1
            ((reason, sums),) = await node.ends(1)
            assert (reason, sums["code"]) == ("client", 1000)
            assert sums["bytes_in"] > 1_070_000
            assert sums["bytes_out"] > 1_070_000
            await until(lambda: node.in_use() == 0, "the slot")
            about = node.of("admit")[0][3]
            assert about["pool"] == "echo"
            assert about["owner"].startswith("user:")

    run(main())
