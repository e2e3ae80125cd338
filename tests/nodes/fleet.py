"""Several real nodes on one PostgreSQL, each with a data directory of its own, and where asked behind a proxy that can cut it off."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

from ostler.store import Store
from ostler.store.rows import NewJob
from tests.harness import APP, Node, until
from tests.servers import Proxy, Server

FLOCK = Path(__file__).with_name("flock.py")
LEASE = 2.0
SHORT = {
    "OSTLER_HEARTBEAT_INTERVAL": "0.3",
    "OSTLER_NODE_LEASE": str(LEASE),
    "OSTLER_STALE_AFTER": "60",
    "OSTLER_UPKEEP_INTERVAL": "1",
    "OSTLER_LOG_LEVEL": "info",
    "OSTLER_CRASH_LIMIT": "1000",
}


class Member(Node):
    """A node of a fleet."""

    proxy: Proxy | None = None
    name = ""

    def start(self, *, ready: bool = True) -> Member:
        """Until it is ready; workers of other nodes do not matter here."""
        pid = self.start_process()
        until(lambda: self._address(pid), "the node to listen")
        if ready:
            self.until(lambda: self.get("/readyz")[0] == 200)
        return self

    def ids(self, fleet: Fleet) -> list[str]:
        """The ids that the node of this data directory has had, oldest first."""
        home = (self.folder / "home").read_text().strip()
        return [
            row["id"] for row in fleet.rows("SELECT id FROM ostler.nodes WHERE home = %s ORDER BY started_at", home)
        ]

    def id(self, fleet: Fleet) -> str:
        return self.ids(fleet)[-1]

    def until(self, found: Callable[[], Any]) -> None:
        try:
            until(found, f"{self.name} to say so")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()[-3000:]}") from None


class Fleet:
    """Nodes, and a look into their database that no proxy is in the way of."""

    def __init__(self, server: Server, database: str, folder: Path) -> None:
        self.server, self.database, self.folder = server, database, folder
        self.url = server.url(database)
        self.members: list[Member] = []
        self._numbers = itertools.count(1)

    # ---- nodes

    def node(
        self,
        *flags: str,
        name: str = "",
        app: Path = APP,
        proxied: bool = False,
        start: bool = True,
        folder: Path | None = None,
        **env: str,
    ) -> Member:
        number = next(self._numbers)
        proxy = self.server.proxy() if proxied else None
        url = self.server.url(self.database, port=proxy.port) if proxy else self.url
        name = name or f"n{number}"
        where = folder or self.folder / f"n{number}"
        member = Member(where, app, "--name", name, *flags, **{**SHORT, "OSTLER_STORE": url, **env})
        member.proxy, member.name = proxy, name
        self.members.append(member)
        if start:
            member.start()
        return member

    def nodes(self, count: int, *flags: str, **how: Any) -> list[Member]:
        """Several at once: they start side by side."""
        made = [self.node(*flags, start=False, **how) for _ in range(count)]
        for member in made:
            member.start_process()
        for member in made:
            self.await_up(member)
        return made

    def await_up(self, member: Member) -> None:
        until(lambda: member._address(member.pid), "the node to listen")
        until(lambda: member.get("/readyz")[0] == 200, f"{member.name} to be ready")

    def close(self) -> None:
        for member in self.members:
            if member.process is not None and member.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    member.kill()
            if member.proxy is not None:
                member.proxy.close()

    def logs(self) -> str:
        return "\n".join(f"---- {m.name}\n{m.log()[-2500:]}" for m in self.members if m.process)

    # ---- the database

    def rows(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        with psycopg.connect(self.url, autocommit=True, row_factory=dict_row) as connection:
            return connection.execute(sql, values or None).fetchall()

    def one(self, sql: str, *values: Any) -> Any:
        return next(iter(self.rows(sql, *values)[0].values()))

    def store(self) -> Store:
        return Store.open(self.url, self.folder)

    def enqueue(self, task: str, args: str, queue: str = "work", **how: Any) -> int:
        """As a producer elsewhere does, without a node."""
        with self.store() as store:
            return store.jobs.enqueue([NewJob(task, queue, args, **how)], store.now())[0]

    def enqueue_many(self, task: str, args: list[str], queue: str = "work", **how: Any) -> list[int]:
        with self.store() as store:
            return store.jobs.enqueue([NewJob(task, queue, each, **how) for each in args], store.now())

    def job(self, job: int) -> dict[str, Any]:
        with self.store() as store:
            return store.jobs.get(job)

    def events(self, job: int) -> list[str]:
        return [e["name"] for e in self.job(job)["events"] if e["name"] not in ("progress", "begun")]

    def wait_begun(self, *jobs: int) -> None:
        """Until each of the jobs runs and has said so."""
        count = "SELECT count(DISTINCT job) FROM ostler.job_events WHERE name = 'begun' AND job = ANY(%s)"
        self.until(lambda: self.one(count, list(jobs)) == len(jobs), f"{jobs} to begin")

    def wait_all(self, jobs: list[int], *statuses: str, patience: float = 90) -> None:
        count = "SELECT count(*) FROM ostler.jobs WHERE id = ANY(%s) AND status = ANY(%s)"
        wanted = list(statuses or ("done",))
        self.until(lambda: self.one(count, jobs, wanted) == len(jobs), f"{len(jobs)} jobs to be {wanted}", patience)

    def status(self, node: str) -> str:
        return str(self.one("SELECT status FROM ostler.nodes WHERE id = %s", node))

    def dead(self) -> list[str]:
        return [row["id"] for row in self.rows("SELECT id FROM ostler.nodes WHERE status = 'dead'")]

    def until(self, found: Any, what: str, patience: float = 90) -> Any:
        """As the harness's, and a server that is away is waited for; when in vain, the nodes' logs are told."""

        def look() -> Any:
            with contextlib.suppress(psycopg.OperationalError):
                return found()

        try:
            return until(look, what, patience)
        except AssertionError as error:
            jobs = ""
            with contextlib.suppress(Exception):
                left = "SELECT id, task, status, later, behind, node, attempt FROM ostler.jobs WHERE status <> 'done' LIMIT 10"
                jobs = "\n".join(map(str, self.rows(left)))
            raise AssertionError(f"{error}\n{jobs}\n{self.logs()}") from None
