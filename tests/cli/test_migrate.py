"""`ostler migrate`: the schema of both stores."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from ostler.store import Store, queries
from tests.harness import Node
from tests.servers import Server


def migrate(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "ostler", "migrate", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, cwd=cwd)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_schema_is_made_and_told(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    store = () if kind == "sqlite" else ("--store", request.getfixturevalue("database"))
    names = [name for _, name, _ in queries.migrations(kind)]
    before = migrate(*store, "--check", cwd=tmp_path)
    assert before.returncode == 1 and f"has version 0; pending: {', '.join(names)}" in before.stdout
    assert not (tmp_path / ".ostler").exists(), "--check made something"
    told = json.loads(migrate(*store, "--check", "--json", cwd=tmp_path).stdout)
    assert (told["version"], told["pending"], told["applied"]) == (0, names, [])
    done = migrate(*store, cwd=tmp_path)
    assert done.returncode == 0 and f": applied {', '.join(names)}" in done.stdout, done.stderr
    for arguments in ((), ("--check",)):
        again = migrate(*store, *arguments, cwd=tmp_path)
        assert again.returncode == 0 and f"is up to date (version {queries.newest(kind)})" in again.stdout


def test_an_older_schema_is_brought_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = queries.migrations("sqlite")
    with monkeypatch.context() as patch:
        patch.setattr(queries, "migrations", lambda _dialect: known[:2])
        Store.open("", tmp_path).close()
    check = migrate("--data", str(tmp_path), "--check", cwd=tmp_path)
    assert check.returncode == 1 and "has version 2; pending: 0003_rules" in check.stdout
    done = migrate("--data", str(tmp_path), "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["applied"] == [name for _, name, _ in known[2:]]


def test_one_role_makes_the_schema_and_another_without_that_right_uses_it(
    database: str, postgres: Server, make_node: Any, tmp_path: Path
) -> None:
    name = str(psycopg.conninfo.conninfo_to_dict(database)["dbname"])
    owner, user = (f"{role}_{random.getrandbits(32):x}" for role in ("owner", "node"))
    for role in (owner, user):
        postgres.create_role(role)
    try:
        mine = postgres.url(name, user=user)
        refused = migrate("--store", mine, cwd=tmp_path)
        assert refused.returncode == 2
        assert "A role that may create the schema runs 'ostler migrate' once" in refused.stderr
        postgres.sql(f'GRANT CREATE ON DATABASE "{name}" TO {owner}')
        assert migrate("--store", postgres.url(name, user=owner), cwd=tmp_path).returncode == 0
        with psycopg.connect(postgres.url(name, user=owner), autocommit=True) as connection:
            connection.execute(f"GRANT USAGE ON SCHEMA ostler TO {user}")
            for kind in ("TABLES", "SEQUENCES"):
                connection.execute(f"GRANT ALL ON ALL {kind} IN SCHEMA ostler TO {user}")
        assert migrate("--store", mine, "--check", cwd=tmp_path).returncode == 0
        node: Node = make_node("--pool", "work=1", "--pool", "other=1", OSTLER_STORE=mine)
        assert node.wait_job(node.enqueue("add", a=1), "done")["result"] == 2
        assert node.stop() == 0
    finally:
        for role in (user, owner):
            postgres.sql(f"DROP OWNED BY {role} CASCADE", database=name)
            postgres.sql(f"DROP ROLE {role}")


def test_a_server_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    done = migrate("--store", "postgresql://127.0.0.1:1/none", "--check", cwd=tmp_path)
    assert done.returncode == 2 and "cannot be used right now" in done.stderr and "Traceback" not in done.stderr
