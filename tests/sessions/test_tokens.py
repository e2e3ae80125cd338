"""Tokens that open sessions and do nothing else."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ostler import config
from ostler.errors import ConfigError
from ostler.plane.access import Access, Caller, Refusal, Token

CI = Token("ci", "the-secret-of-the-tests", ["chromium"], 10, 5)
LOCAL = Access("the-node's-token", "store", True, frozenset(), frozenset({1000}), tokens=(CI,))
HOST = (b"host", b"localhost:8356")


def caller(*headers: tuple[bytes, bytes], query: bytes = b"", peer: int | None = None) -> Caller | int:
    found = LOCAL.caller("GET", "/sessions/chromium", query, [HOST, *headers], peer)
    return found.status if isinstance(found, Refusal) else found


def bearer(token: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {token}".encode()


def loaded(tmp_path: Path, text: str) -> config.Settings:
    file = tmp_path / "ostler.toml"
    file.write_text(text)
    return config.load(file=file, environ={})


def test_who_opens_a_session_is_its_owner() -> None:
    limited = Caller("token:ci", frozenset({"chromium"}), 10, 5)
    assert caller(bearer(CI.secret)) == limited
    assert caller(query=b"token=" + CI.secret.encode()) == limited
    assert caller(bearer(CI.secret), peer=1000) == limited, "a token counts more than a user"
    assert caller(bearer(LOCAL.token)) == Caller("token")
    assert caller(peer=1000) == Caller("user:1000")
    assert caller(peer=1001) == caller(bearer("wrong")) == caller() == 401
    by = (b"ostler-forwarded-by", b"n1")
    assert caller(bearer("store"), by, (b"x-ostler-owner", b"token:ci")) == Caller("token:ci", via="n1")
    assert caller(bearer("store"), by) == Caller("node:n1", via="n1")
    assert caller(bearer("store")) == 401, "a node says that it is one"
    assert caller(bearer(CI.secret), (b"x-ostler-owner", b"token")) == limited, "only nodes speak for others"


def test_it_may_do_nothing_else_on_the_node() -> None:
    for path in ("/", "/api/v1/jobs", "/api/v1/sessions", "/api/v1/calls/embedding", "/v1/models", "/metrics"):
        found = LOCAL.refusal("GET", path, b"", [HOST, bearer(CI.secret)], None)
        assert found is not None
        assert (found.status, found.code) == (403, "FORBIDDEN"), path
    assert LOCAL.refusal("GET", "/healthz", b"", [HOST, bearer(CI.secret)], None) is None


def test_the_rule_travels_to_the_plane_with_its_tokens() -> None:
    assert Access.read(json.loads(json.dumps(LOCAL.frame()))) == LOCAL


def test_tokens_come_from_the_settings_file(tmp_path: Path) -> None:
    text = f'[tokens.ci]\nsecret = "{CI.secret}"\npools = ["chromium"]\nsessions = 10\npriority = 5\n[tokens.all]\nsecret = "0123456789abcdef"\n'
    settings = dataclasses.replace(loaded(tmp_path, text), data=str(tmp_path / "data"), token="x" * 20)
    tokens = Access.of(settings).tokens
    assert tokens == (CI, Token("all", "0123456789abcdef", [], 0, 0))
    assert tokens[1].caller == Caller("token:all", frozenset(), 0, 0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[tokens.a]\nsecret = 'short'", "at least 16 ASCII characters"),
        ("[tokens.a]\npools = ['x']", "secret must be text"),
        ("[tokens.a]\nsecret = '0123456789abcdef'\npools = 'x'", "pools must be a list of names"),
        ("[tokens.a]\nsecret = '0123456789abcdef'\nsessions = -1", "sessions must be a whole number"),
        ("[tokens.a]\nsecret = '0123456789abcdef'\npriority = 101", "priority must be a whole number from -100 to 100"),
        ("[tokens.a]\nsecret = '0123456789abcdef'\npool = 'x'", "'pool' is not a key of a token"),
        ("[tokens]\na = 3", "must be a table"),
        ("[tokens.'a b']\nsecret = '0123456789abcdef'", "a token's name may have letters"),
        (
            "[tokens.a]\nsecret = '0123456789abcdef'\n[tokens.b]\nsecret = '0123456789abcdef'",
            "a and b have the same secret",
        ),
        ("token = '0123456789abcdef'\n[tokens.a]\nsecret = '0123456789abcdef'", "the node's token"),
    ],
)
def test_a_token_that_cannot_work_is_refused_without_its_secret_in_the_message(
    tmp_path: Path, text: str, why: str
) -> None:
    with pytest.raises(ConfigError) as found:
        loaded(tmp_path, text)
    assert why in str(found.value)
    assert "0123456789abcdef" not in str(found.value)
