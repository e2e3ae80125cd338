"""The store behind PgBouncer in transaction mode, where each transaction may run on another session."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ostler.errors import ConfigError
from ostler.store import Store
from ostler.store.nodes import NodeRow
from ostler.store.rows import Finish, NewJob, Turn
from tests.harness import until
from tests.servers import LOOPBACK, PASSWORD, SUPERUSER, Server, free_port

POOLER = shutil.which("pgbouncer", path=os.environ["PATH"] + ":/usr/sbin")

pytestmark = pytest.mark.skipif(POOLER is None, reason="pgbouncer is not installed (apt install pgbouncer)")


@pytest.fixture
def pooled(postgres: Server, database: str):
    """The URL of the test's database through a pooler with two sessions."""
    with tempfile.TemporaryDirectory(prefix="ostler-pooler-") as folder:
        yield from _pooled(postgres, urlsplit(database).path.lstrip("/"), Path(folder))


def _pooled(postgres: Server, name: str, tmp_path: Path):
    port = free_port()
    users = tmp_path / "users.txt"
    users.write_text(f'"{SUPERUSER}" "{PASSWORD}"\n')
    (tmp_path / "pooler.ini").write_text(
        f"[databases]\n* = host={LOOPBACK} port={postgres.port}\n[pgbouncer]\nlisten_addr = {LOOPBACK}\nlisten_port = {port}\n"
        f"auth_type = scram-sha-256\nauth_file = {users}\npool_mode = transaction\ndefault_pool_size = 2\nmax_client_conn = 50\n"
        "unix_socket_dir =\nlogfile =\n"
    )
    for path in (tmp_path, users, tmp_path / "pooler.ini"):
        path.chmod(0o755)
    who = {"user": 65534, "group": 65534, "extra_groups": []} if os.getuid() == 0 else {}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([str(POOLER), str(tmp_path / "pooler.ini")], stdout=log, stderr=log, **who)
    try:
        until(lambda: _answers(port) or process.poll() is not None, "the pooler to listen")
        assert process.poll() is None, (tmp_path / "log").read_text()
        yield f"postgresql://{SUPERUSER}:{PASSWORD}@{LOOPBACK}:{port}/{name}?pooler=1"
    finally:
        process.terminate()
        process.wait()


def _answers(port: int) -> bool:
    with closing(socket.socket()) as probe:
        return probe.connect_ex((LOOPBACK, port)) == 0


def test_verbs_work_on_sessions_that_change_with_every_transaction(pooled: str, tmp_path: Path) -> None:
    stores = [Store.open(pooled, tmp_path) for _ in range(4)]
    try:
        stores[0].nodes.register(NodeRow("n@1", "n", 30_000, home="h"))
        for n, store in enumerate(stores * 10):
            store.jobs.enqueue([NewJob("t", "q", "{}", limit_key="k", limit_max=100, unique_key=f"u{n}")], store.now())
        for number in range(1, 21):
            store = stores[number % 4]
            claims = store.turns.take(Turn("n@1", store.now(), wants={"q": ["w:0", "w:1"]}, number=2 * number)).claims
            ends = [Finish(c.id, c.fence, "done", 1, 2, "done") for c in claims]
            assert stores[(number + 1) % 4].turns.take(Turn("n@1", 1, finishes=ends, number=2 * number + 1)).lost == []
        assert stores[0].jobs.depths() == {}
        assert len(stores[0].jobs.matching("done", 100)) == 40
    finally:
        for store in stores:
            store.close()


def test_a_url_that_does_not_name_the_pooler_is_refused_with_what_to_add(pooled: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unsupported startup parameter.*PgBouncer.* add \?pooler=1 to the URL"):
        Store.open(pooled.removesuffix("?pooler=1"), tmp_path)


def test_a_node_behind_a_pooler_finds_jobs_by_its_poll(pooled: str, make_node) -> None:
    node = make_node("--pool", "work=1", "--pool", "other=1", OSTLER_STORE=pooled, OSTLER_POLL_INTERVAL="0.1")
    with Store.open(pooled, node.folder) as store:
        (job,) = store.jobs.enqueue([NewJob("add", "work", '{"a": 1, "b": 2}')], store.now())
    assert node.wait_job(job)["status"] == "done"
    node.stop()
