"""The servers that tests run against do what tests ask of them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from tests.harness import until
from tests.servers import Given, Server, family, installed


@pytest.fixture
def ours(postgres: Server) -> Server:
    if not postgres.ours:
        pytest.skip("the server of OSTLER_TEST_POSTGRES is not ours to stop")
    return postgres


@pytest.mark.parametrize("major", installed())
def test_each_installed_version_starts_and_its_folder_goes_with_it(major: int):
    with Server(major) as server:
        assert int(server.sql("SHOW server_version_num")[0][0]) // 10000 == major
        assert server.folder.exists()
    assert not server.folder.exists()


def test_each_test_has_an_empty_database_of_its_own(postgres: Server, database: str):
    with psycopg.connect(database) as connection:
        connection.execute("CREATE TABLE mine (n int)")
    other = postgres.create_database()
    assert postgres.sql("SELECT to_regclass('mine')", database=other) == [(None,)]
    postgres.drop_database(other)


def test_a_database_is_copied_with_its_tables(postgres: Server):
    model = postgres.create_database()
    postgres.sql("CREATE TABLE kept AS SELECT 7 AS n", database=model)
    copy = postgres.create_database(template=model)
    assert postgres.sql("SELECT n FROM kept", database=copy) == [(7,)]
    for name in (copy, model):
        postgres.drop_database(name)


def test_committed_rows_survive_every_way_to_end_the_server(ours: Server, database: str):
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CREATE TABLE kept (n int)")
        connection.execute("INSERT INTO kept VALUES (1)")
        ours.restart("immediate")
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    ours.kill()
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(database)
    ours.start()
    ours.restart()
    with psycopg.connect(database) as connection:
        assert connection.execute("SELECT n FROM kept").fetchall() == [(1,)]


def test_a_paused_server_answers_nothing_until_it_is_resumed(ours: Server, database: str):
    with closing(psycopg.connect(database, autocommit=True)) as connection:
        ours.pause()
        connection.pgconn.send_query(b"SELECT 1")
        assert not _readable(connection, 0.2)
        ours.resume()
        assert _readable(connection, 30)


def test_a_stranger_is_refused_and_a_plain_role_creates_nothing(postgres: Server):
    postgres.create_role("plain")
    name = postgres.create_database()
    url = postgres.url(name, user="plain", tcp=True)
    with psycopg.connect(url) as connection, pytest.raises(psycopg.errors.InsufficientPrivilege):
        connection.execute("CREATE SCHEMA ostler")
    if postgres.ours:
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(postgres.url(name, user="plain", password="wrong", tcp=True))
    postgres.drop_database(name)
    postgres.sql("DROP ROLE plain")


def test_a_given_server_is_used_by_its_url(postgres: Server):
    given = Given(postgres.url("postgres", tcp=True))
    name = given.create_database()
    assert given.sql("SELECT current_database()", database=name) == [(name,)]
    given.drop_database(name)
    assert given.major == postgres.major


def test_a_proxy_that_drops_holds_what_is_sent_until_it_is_healed(postgres: Server):
    with postgres.proxy() as proxy, closing(_through(postgres, proxy.port)) as connection:
        proxy.drop()
        connection.pgconn.send_query(b"SELECT 1")
        assert not _readable(connection, 0.2)
        with pytest.raises(psycopg.OperationalError, match="timeout"):
            _through(postgres, proxy.port, connect_timeout=2)
        proxy.heal()
        assert _readable(connection, 30)


def test_a_proxy_that_refuses_resets_connections_until_it_is_healed(postgres: Server):
    with postgres.proxy() as proxy, closing(_through(postgres, proxy.port)) as connection:
        proxy.refuse()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
        with pytest.raises(psycopg.OperationalError, match="refused"):
            _through(postgres, proxy.port)
        proxy.heal()
        with _through(postgres, proxy.port) as again:
            assert again.execute("SELECT 1").fetchone() == (1,)


def test_the_server_ends_with_the_process_that_started_it_also_when_that_is_killed():
    code = (
        "import time; from tests.servers import Server; s = Server().start(); s.pause();"
        "print(s.process.pid, s.folder, flush=True); time.sleep(600)"
    )
    root = Path(__file__).parent.parent
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root) as starter:
        assert starter.stdout is not None
        pid, folder = starter.stdout.readline().split()
        pids = family(int(pid))
        starter.kill()
    until(lambda: not any(_exists(each) for each in pids), "the end of the server and its backends")
    until(lambda: not Path(os.fsdecode(folder)).exists(), "the end of its folder")


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIG_DFL)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def _through(server: Server, port: int, **options: int) -> psycopg.Connection:
    return psycopg.connect(server.url(port=port), autocommit=True, **options)


def _readable(connection: psycopg.Connection, seconds: float) -> bool:
    return bool(select.select([connection.fileno()], [], [], seconds)[0])
