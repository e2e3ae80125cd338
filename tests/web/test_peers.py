"""Whose process is at the other end of a connection, as the kernel tells."""

from __future__ import annotations

import ipaddress
import os
import socket

import pytest

from ostler.plane import peers
from ostler.web.connections import Connection
from ostler.plane.peers import Peers
from tests import users
from tests.users import NOBODY, as_root


def listening(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family)
    found.settimeout(30)
    try:
        found.bind((host, 0))
    except OSError:
        found.close()
        pytest.skip(f"this machine has no {host}")
    found.listen()
    return found


def looked_up(peer, ours) -> list[int | None]:
    """By both ways."""
    packed = [ipaddress.ip_address(where[0]).packed for where in (peer, ours)]
    return [Connection.peers.uid(peer[:2], ours[:2]), peers._listed(packed[0], peer[1], packed[1], ours[1])]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_user_of_a_connection_is_known_while_its_process_holds_it(host: str) -> None:
    with listening(host) as server, socket.create_connection(server.getsockname()[:2]) as client:
        accepted, peer = server.accept()
        with accepted:
            assert looked_up(peer, server.getsockname()) == [os.geteuid()] * 2
            client.close()
            assert looked_up(peer, server.getsockname()) == [None, None], "a closed socket is listed as root's"


@as_root
def test_another_user_is_told_apart() -> None:
    with listening("127.0.0.1") as server:
        code = "import socket, sys; s = socket.socket(); s.connect((sys.argv[1], int(sys.argv[2]))); print(s.recv(1))"
        client = users.popen(NOBODY, "-c", code, *map(str, server.getsockname()), stdout=-3, cwd="/")
        accepted, peer = server.accept()
        with accepted:
            assert looked_up(peer, server.getsockname()) == [NOBODY] * 2
        client.wait(30)


def test_a_listener_on_the_clients_port_is_not_taken_for_the_client() -> None:
    with listening("127.0.0.1") as server, listening("127.0.0.1") as other:
        assert looked_up(other.getsockname(), server.getsockname()) == [None, None]


def test_where_the_kernel_does_not_answer_the_table_is_read() -> None:
    with listening("127.0.0.1") as server, socket.create_connection(server.getsockname()):
        accepted, peer = server.accept()
        with accepted:
            blind = Peers()
            blind._is_open = True  # and there is no socket
            assert blind.uid(peer, server.getsockname()) == os.geteuid()


def test_who_is_not_on_this_machine_is_nobody() -> None:
    assert Connection.peers.uid(("203.0.113.9", 1), ("127.0.0.1", 2)) is None
