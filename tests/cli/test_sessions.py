"""What `ostler sessions` prints, of answers that are made up."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from ostler.cli import client, sessions
from ostler.errors import Conflict
from tests.web.session_pools import ODD

SESSION = {
    "id": "s1", "pool": "chromium", "serves": "chromium", "node": "n@1", "worker": "worker:chromium:0", "state": "live", "owner": ODD * 5, "client": "10.0.0.7:1\x1b[2J",
    "agent": ODD, "priority": 0, "key": None, "via": None, "waited_ms": 1500.0, "started_at": 0, "ended_at": None, "bytes_in": 20_480, "bytes_out": 7,
    "idle": 3.2, "views": True, "reason": None, "text": None, "code": None,
}  # fmt: skip
WORKER = {
    "component": "worker:chromium:0",
    "status": "draining",
    "slots": 8,
    "in_use": 3,
    "served": 50,
    "lifetime": 50,
    "probe_ms": 0.94,
    "mb": 210.4,
    "started_at": None,
    "versions": ["1.65"],
}
FAR = {**WORKER, "name": "far", "serves": "chromium", "status": "available", "lifetime": 0}
ROOM = {
    "name": "chromium",
    "pools": ["chromium"],
    "slots": 0,
    "in_use": 3,
    "free": 0,
    "waiting": 2,
    "paused": True,
    "workers": [WORKER],
    "line": [{"owner": "token:a", "priority": 0, "waited": 14.0}],
}


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch):
    """Run the command; what the node answers, or raises, is given."""

    def run(*words: str, **answers: Any) -> str:
        def request(settings: Any, method: str, path: str) -> Any:
            found = next(answer for part, answer in answers.items() if path.partition("?")[0].endswith(part))
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(client, "request", request)
        monkeypatch.setattr(sessions, "node_url", lambda _: "http://x")
        return CliRunner().invoke(sessions.sessions, [*words]).output

    return run


def test_what_clients_say_is_cut_and_moves_no_cursor(say) -> None:
    shown = say(sessions={"sessions": [SESSION], "next": "live/0/s1", "live": 1})
    assert "\x1b" not in shown and "\\x1b[2J" in shown
    assert f"{(ODD * 5)[:39]}…" in shown and ODD * 2 not in shown
    assert "20 KB" in shown and "3.2 s" in shown and shown.endswith("more: --before live/0/s1\n")
    over = {
        **SESSION,
        "state": "ended",
        "ended_at": 90_000,
        "reason": "idle",
        "text": "ostler: nothing was sent",
        "idle": None,
    }
    shown = say("--state", "ended", sessions={"sessions": [over], "next": None, "live": 0})
    assert "90 s" in shown and "idle: ostler: nothing was sent (" in shown
    assert say(sessions={"sessions": [], "next": None, "live": 0}) == "no sessions\n"


def test_capacity_shows_this_node_and_the_others(say) -> None:
    shown = say("capacity", capacity={"node": "n@1", "pools": [ROOM], "elsewhere": [FAR]})
    assert "chromium (paused): 3 in use, 0 of 0 slots free, 2 waiting" in shown
    assert "■■■□□□□□" in shown and "50/50" in shown and "0.9 ms" in shown and "210 MB" in shown
    assert "first in line: token:a, waiting for 14 s" in shown
    assert "far/worker:chromium:0" in shown and "available" in shown
    assert "declare one with @app.sessions" in say("capacity", capacity={"node": "n@1", "pools": [], "elsewhere": []})


def test_many_are_ended_at_once_and_what_failed_is_told(say) -> None:
    shown = say(
        "kill", "a", "b", "c", a={"here": True}, b={"here": False}, c=Conflict("session c has already ended: client")
    )
    assert shown.splitlines() == [
        "ended session a",
        "session b: asked its node to end it",
        "ostler: session c has already ended: client",
    ]
