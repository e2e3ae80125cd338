"""A PostgreSQL store that cannot be used: one sentence that says what is wrong, exit code 2, no password in it and no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ostler.errors import ConfigError, NoAccess, StoreBusy
from ostler.store import Store, postgres as dialect
from ostler.store.rows import NewJob
from tests.harness import APP
from tests.servers import LOOPBACK, Server

SECRET = "tell-nobody"


@pytest.fixture
def weak(postgres: Server, database: str):
    """A role that may connect, and nothing else."""
    name = f"weak_{name_of(database)}"
    postgres.create_role(name, SECRET)
    yield name
    postgres.sql(f'DROP OWNED BY "{name}" CASCADE', database=name_of(database))
    postgres.sql(f'DROP ROLE "{name}"')


def name_of(url: str) -> str:
    return urlsplit(url).path.lstrip("/")


def refusals(server: Server, database: str) -> dict[str, str]:
    """What is wrong -> a URL with it."""
    name, here = name_of(database), f"{LOOPBACK}:{server.port}"
    return {
        "password authentication failed": server.url(name, user="postgres", password=SECRET, tcp=True),
        "no password supplied": f"postgresql://postgres@{here}/{name}",
        'database "nope" does not exist': server.url("nope", tcp=True),
        "could not be cast to integer": f"postgresql://u:{SECRET}@{LOOPBACK}:port/db",
        "Invalid IPv6 URL": f"postgresql://u:{SECRET}@[::1/db",
        "it names no database": "postgresql://",
        'invalid URI query parameter: "nonsense"': f"postgresql://u:{SECRET}@{here}/{name}?nonsense=1",
        "invalid percent-encoded token": f"postgresql://u:{SECRET}%zz@{here}/{name}",
        "invalid sslmode value": f"postgresql://u:{SECRET}@{here}/{name}?sslmode=perhaps",
        "is not supported": f"mysql://u:{SECRET}@{here}/{name}",
    }


def test_what_is_wrong_with_a_url_is_said_in_one_sentence_without_the_password(
    postgres: Server, database: str, tmp_path: Path
) -> None:
    if not postgres.ours:
        pytest.skip("how this server lets clients in is not known")
    for says, url in refusals(postgres, database).items():
        with pytest.raises(ConfigError) as told:
            Store.open(url, tmp_path)
        assert says in str(told.value)
        assert "\n" not in str(told.value)
        assert SECRET not in str(told.value)


def test_a_server_that_is_not_there_is_busy_not_wrong(tmp_path: Path) -> None:
    with pytest.raises(StoreBusy, match="cannot be used right now .*refused"):
        Store.open(f"postgresql://u:{SECRET}@{LOOPBACK}:1/db", tmp_path)


def test_a_role_that_may_not_create_is_told_what_to_grant(
    postgres: Server, database: str, weak: str, tmp_path: Path
) -> None:
    name = name_of(database)
    url = postgres.url(name, user=weak, password=SECRET, tcp=True)
    with pytest.raises(NoAccess, match="permission denied for database .* 'ostler migrate' once.* GRANT CREATE"):
        Store.open(url, tmp_path)
    Store.open(database, tmp_path).close()  # one who may does it
    with pytest.raises(NoAccess, match="permission denied for schema ostler"):
        Store.open(url, tmp_path)
    for right in ("USAGE ON SCHEMA", "ALL ON ALL TABLES IN SCHEMA", "ALL ON ALL SEQUENCES IN SCHEMA"):
        postgres.sql(f'GRANT {right} ostler TO "{weak}"', database=name)
    with Store.open(url, tmp_path) as store:  # from then on it needs no more than that
        assert len(store.jobs.enqueue([NewJob("t", "q", "{}")], 1)) == 1


def test_a_server_that_is_too_old_is_refused(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialect, "OLDEST", 990000)
    with pytest.raises(ConfigError, match=r"is PostgreSQL \d+; ostler needs 99 or newer"):
        Store.open(database, tmp_path)


def test_a_database_that_is_full_of_connections_or_starts_is_busy(
    postgres: Server, database: str, weak: str, tmp_path: Path
) -> None:
    postgres.sql(f'ALTER DATABASE "{name_of(database)}" CONNECTION LIMIT 0')
    with pytest.raises(StoreBusy, match="too many connections"):
        Store.open(postgres.url(name_of(database), user=weak, password=SECRET, tcp=True), tmp_path)


def test_a_connection_that_worked_once_is_tried_again_whatever_the_server_says(
    postgres: Server, database: str, weak: str, tmp_path: Path
) -> None:
    """A password that is changed under a running node must not cost it its results."""
    name = name_of(database)
    postgres.sql(f'GRANT CREATE ON DATABASE "{name}" TO "{weak}"')
    with Store.open(postgres.url(name, user=weak, password=SECRET, tcp=True), tmp_path) as store:
        postgres.sql(f"ALTER ROLE \"{weak}\" PASSWORD 'another'")
        postgres.sql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{weak}'")
        for _ in range(2):
            with pytest.raises(StoreBusy):
                store.jobs.enqueue([NewJob("t", "q", "{}")], 1)
        postgres.sql(f"ALTER ROLE \"{weak}\" PASSWORD '{SECRET}'")
        assert store.jobs.enqueue([NewJob("t", "q", "{}")], 1) == [1]


@pytest.mark.parametrize("what", ["password", "database", "rights", "newer"])
def test_ostler_up_ends_with_one_sentence_and_exit_code_2(
    postgres: Server, database: str, weak: str, tmp_path: Path, what: str
) -> None:
    name = name_of(database)
    if what == "newer":
        with Store.open(database, tmp_path) as store:
            store.db._query("INSERT INTO ostler.migrations VALUES (99, 'much later')")
    url, says = {
        "password": (postgres.url(name, password=SECRET, tcp=True), "password authentication failed"),
        "database": (postgres.url("nope", tcp=True), "does not exist"),
        "rights": (postgres.url(name, user=weak, password=SECRET, tcp=True), "GRANT CREATE ON DATABASE"),
        "newer": (database, "has version 99"),
    }[what]
    done = subprocess.run(
        [sys.executable, "-m", "ostler", "up", str(APP), "--data", str(tmp_path / "data"), "--port", "0"],
        env={**{k: v for k, v in os.environ.items() if not k.startswith("OSTLER_TEST_")}, "OSTLER_STORE": url},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
    assert done.stderr.startswith("ostler: ")
    assert done.stderr.count("\n") == 1
    assert SECRET not in done.stderr
