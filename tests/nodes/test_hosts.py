"""A node as a host of its own: in a network namespace, cut off from the database by taking its link down."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import APP
from tests.nodes.fleet import SHORT, Fleet, Member
from tests.servers import PASSWORD, SUPERUSER, Server

NAME = f"ost{os.getpid() % 10_000}"
HERE, THERE = "10.211.7.1", "10.211.7.2"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def link() -> Iterator[str]:
    """A namespace with a link to us; the name of our end."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 for a network namespace")
    try:
        ip("netns", "add", NAME)
    except subprocess.CalledProcessError as refused:
        pytest.skip(f"no network namespaces here: {refused.stderr.decode().strip()}")
    try:
        try:
            ip("link", "add", f"{NAME}a", "type", "veth", "peer", "name", f"{NAME}b", "netns", NAME)
        except subprocess.CalledProcessError as refused:
            pytest.skip(f"no veth links here: {refused.stderr.decode().strip()}")
        ip("addr", "add", f"{HERE}/30", "dev", f"{NAME}a")
        ip("link", "set", f"{NAME}a", "up")
        ip("-n", NAME, "addr", "add", f"{THERE}/30", "dev", f"{NAME}b")
        ip("-n", NAME, "link", "set", f"{NAME}b", "up")
        ip("-n", NAME, "link", "set", "lo", "up")
        yield f"{NAME}a"
    finally:
        ip("netns", "del", NAME)


@pytest.fixture
def far(tmp_path: Path, link: str) -> Iterator[Fleet]:
    """A fleet on a server that listens on the link, too."""
    with Server(listen_addresses=f"127.0.0.1,{HERE}") as server:
        with (server.data / "pg_hba.conf").open("a") as file:
            file.write(f"host all all {THERE}/32 scram-sha-256\n")
        server.sql("SELECT pg_reload_conf()")
        fleet = Fleet(server, server.create_database(), tmp_path)
        yield fleet
        fleet.close()


class Host(Member):
    """A node in the namespace. Only we look at it through the database: its HTTP is as far away as itself."""

    def command(self) -> list[str]:
        return ["ip", "netns", "exec", NAME, *super().command()]


def test_a_host_that_is_cut_off_past_its_lease_loses_its_jobs_and_comes_back(
    far: Fleet, link: str, tmp_path: Path
) -> None:
    flag = tmp_path / "go"
    url = f"postgresql://{SUPERUSER}:{PASSWORD}@{HERE}:{far.server.port}/{far.database}"
    pools = ("--pool", "work=1", "--pool", "other=0")
    host = Host(tmp_path / "host", APP, "--name", "host", *pools, **{**SHORT, "OSTLER_STORE": url})
    far.members.append(host)
    far.store().close()  # the tables are there before we look into them
    host.start_process()
    far.until(lambda: far.rows("SELECT 1 FROM ostler.health WHERE status = 'healthy'"), "the host's worker")
    job = far.enqueue("wait_for", f'{{"path": "{flag}"}}')
    far.wait_begun(job)
    (other,) = far.nodes(1, *pools)
    before = host.id(far)
    ip("link", "set", link, "down")
    far.until(lambda: far.status(before) == "dead", "it to be declared dead")
    flag.touch()
    far.wait_all([job])
    assert far.job(job)["node"] == other.name
    ip("link", "set", link, "up")
    far.until(lambda: host.id(far) != before and far.status(host.id(far)) == "healthy", "it to come back")
    assert far.events(job) == ["created", "processing", "requeued:stale", "processing", "done"]
    other.stop()
    again = far.enqueue("add", '{"a": 1}')
    far.wait_all([again])
    assert far.job(again)["node"] == "host"
