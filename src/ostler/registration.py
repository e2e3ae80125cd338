"""A node's registration in its store: it waits for the store, takes over what dead nodes left, and tells what its app declares."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
from pathlib import Path
from typing import Any

import ostler
from ostler import folder as folders
from ostler.app import Ostler
from ostler.config import Settings
from ostler.errors import StoreBusy
from ostler.jobs import schedule
from ostler.lifecycle import family, predecessor
from ostler.lifecycle.membership import Membership
from ostler.live.remote import SECRET
from ostler.store import Store, now_ms
from ostler.store.database import is_postgres
from ostler.store.identity import new_id
from ostler.store.nodes import NodeRow
from ostler.web.server import advertised

log = logging.getLogger("ostler")


class Registration:
    """This node in its store. `member` is who it is; the rest is known once `register` has returned."""

    def __init__(self, settings: Settings, app: Ostler, folder: Path, url: str) -> None:
        self._settings, self._app = settings, app
        self.member = Membership(settings, _row(settings, folder, url))
        self.origin = ""  # the store's id
        self.secret = ""  # by which nodes know each other
        self.is_shared = False  # other nodes may use the store
        self.recovered: list[int] = []  # the jobs that dead nodes had left

    async def wait(self, stop: asyncio.Event) -> bool:
        """`register`, when the store's server is there: until then the node waits, and says so. False when it is asked to stop."""
        delay = 0.5
        while not stop.is_set():
            try:
                self.register()
            except StoreBusy as error:
                if not is_postgres(self._settings.store):
                    raise
                log.warning("waiting for the store: %s", error)
                self.member.renew()  # whether a lost answer was a yes does not matter then
            else:
                return True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await stop.wait()
            delay = min(2 * delay, 5.0)
        return False

    def register(self) -> None:
        """Bring the store up to date with the app, and requeue the jobs that dead nodes had left."""
        with Store.open(self._settings.store, self._settings.data_dir, durable=True) as store:
            self.origin = store.meta.once("store_id", secrets.token_hex(8))
            store.jobs.recount()
            predecessor.end_leftovers(store, self.member.row)
            self.secret, self.is_shared = store.meta.once(SECRET, secrets.token_hex(32)), store.db.shared
            self.member.began = store.now()
            self.recovered = predecessor.recover(store, self.member.row)
            store.nodes.register(self.member.row)
            self.declare(store)

    def declare(self, store: Store) -> None:
        """Tell the store the node's tasks and schedules."""
        tasks = (
            {**t.row, "parameters": json.dumps(t.parameters), "policy": json.dumps(t.row["policy"])}
            for t in self._app.tasks.values()
        )
        store.nodes.declare(self.member.id, tasks, self._schedules())

    def _schedules(self) -> list[dict[str, Any]]:
        now = now_ms()
        return [
            {
                "name": name,
                "spec": spec,
                "zone": zone,
                "step": step.waiting(),
                "next_at": schedule.following(spec, zone, now),
            }
            for name, (spec, zone, step) in self._app.schedules.items()
        ]


def _row(settings: Settings, folder: Path, url: str) -> NodeRow:
    """Who this node is. Its id holds for this start, its name is for people."""
    pid = os.getpid()
    return NodeRow(
        id=new_id(settings.node),
        name=settings.node,
        lease_ms=int(settings.node_lease * 1000),
        host=socket.gethostname(),
        home=folders.identity(folder),
        boot_id=family.boot_id(),
        pid=pid,
        pid_start=family.start_time(pid),
        token=secrets.token_hex(8),
        url=advertised(settings, url),
        version=ostler.__version__,
    )
