"""Who may use the node: one decision, for the node's gate and for the data plane."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os

import pytest

from ostler.config import Settings
from ostler.plane.access import Access, read_client, read_peer, tell

LOCAL = Access("sesame", "store", True, frozenset(), frozenset({0, 1000}))
OPEN = dataclasses.replace(LOCAL, loopback=False, friends=frozenset())
PROXIED = dataclasses.replace(LOCAL, public=frozenset({"jobs.example.org"}), friends=frozenset())


def status(
    access: Access,
    *headers: tuple[str, str],
    path: str = "/api/v1/info",
    method: str = "GET",
    query: str = "",
    peer=None,
):
    raw = [(n.encode(), v.encode()) for n, v in headers]
    found = access.refusal(method, path, query.encode(), raw, peer)
    return found.status if found else 200


BEARER = ("authorization", "Bearer sesame")
HOST = ("host", "localhost:8356")


def test_friends_and_those_with_the_token_are_taken_and_nobody_else() -> None:
    assert [status(LOCAL, HOST, peer=uid) for uid in (0, 1000, 1001, None)] == [200, 200, 401, 401]
    assert [status(OPEN, HOST, peer=uid) for uid in (0, 1000, None)] == [401, 401, 401]
    for given in (
        BEARER,
        ("authorization", "bearer sesame"),
        ("cookie", "a=b; ostler_token=sesame"),
        ("cookie", "ostler_token=s%65same"),
    ):
        assert [status(access, HOST, given) for access in (LOCAL, OPEN, PROXIED)] == [200, 200, 200]
    assert status(LOCAL, HOST, query="a=1&token=sesame") == 200
    wrong = (
        ("authorization", "Bearer sesam"),
        ("authorization", "Basic sesame"),
        ("cookie", "token=sesame"),
        ("authorization", ""),
    )
    assert {status(LOCAL, HOST, given) for given in wrong} == {401}
    assert status(LOCAL, HOST, ("authorization", "Bearer no"), BEARER) == 401, "of several headers the first counts"


@pytest.mark.parametrize("header", ["forwarded", "x-forwarded-for", "x-real-ip"])
def test_a_friend_that_asks_for_somebody_else_needs_the_token(header: str) -> None:
    assert status(LOCAL, HOST, (header, "203.0.113.9"), peer=0) == 401
    assert status(LOCAL, HOST, (header, "203.0.113.9"), BEARER, peer=0) == 200


def test_pages_of_other_sites_and_names_of_others_are_refused_with_the_token_too() -> None:
    assert status(LOCAL, ("host", "evil.example"), BEARER) == 403
    assert status(PROXIED, ("host", "jobs.example.org"), BEARER) == 200
    assert status(OPEN, ("host", "anything"), BEARER) == 200
    assert status(LOCAL, HOST, BEARER, ("origin", "http://evil.example")) == 403
    assert status(LOCAL, HOST, BEARER, ("origin", "http://localhost:8356")) == 200
    assert [status(LOCAL, HOST, BEARER, ("origin", "null"), method=m) for m in ("GET", "POST")] == [200, 403]
    assert status(LOCAL, ("host", "[::1"), BEARER) == 403


def test_probes_and_the_way_in_are_open_and_nodes_read_inner_routes_alone() -> None:
    assert {status(OPEN, HOST, path=path) for path in ("/healthz", "/readyz", "/login", "/ui/main.js")} == {200}
    secret = ("authorization", "Bearer store")
    assert status(OPEN, ("host", "node2"), secret, path="/api/v1/inner/logs") == 200
    assert status(OPEN, HOST, secret) == 401
    assert status(OPEN, HOST, secret, path="/api/v1/inner/logs", method="POST") == 401
    assert (
        status(dataclasses.replace(OPEN, secret=""), HOST, ("authorization", "Bearer "), path="/api/v1/inner/x") == 401
    )


def test_the_rule_travels_to_the_plane_unchanged(tmp_path) -> None:
    for host, token, public in itertools.product(("127.0.0.1", "::1"), ("", "sesame"), ("", "a.example, B.example")):
        access = Access.of(Settings(host=host, token=token, public=public, data=str(tmp_path)), "secret")
        assert Access.read(json.loads(json.dumps(access.frame()))) == access
        assert access.friends == (frozenset({0, os.geteuid()}) if not token and not public else frozenset())


def test_what_the_plane_tells_of_a_client_is_read_back_and_anything_else_is_nobody() -> None:
    for peer, client in ((0, ("127.0.0.1", 5)), (None, ("::1", 65535)), (1000, None)):
        lines = dict(line.split(b": ") for line in tell(peer, client).split(b"\r\n")[:-1])
        assert read_peer(lines[b"x-ostler-peer"]) == peer
        assert read_client(lines[b"x-ostler-client"]) == client
    assert {read_peer(said) for said in (None, b"", b"-", b"-1", b"0x0", b"root", b"1 0")} == {None}
    assert {read_client(said) for said in (None, b"", b"-", b"host", b"host:x")} == {None}
