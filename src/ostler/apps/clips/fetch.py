"""Sources by http(s): limited in size and time, and never from inside the own network unless that is allowed.

A name is resolved once, the address is judged, and the connection goes to that very address: a name that changes its
address in between (DNS rebinding) gains nothing. Each redirect is judged anew.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from ostler import Retry
from ostler.apps.clips.rules import PREFIX, Refused, Rules

_REDIRECTS = 5
_CHUNK = 1 << 18
_MOVED = (301, 302, 303, 307, 308)
_PASSING = (408, 425, 429)  # 4xx that ask to come again
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def check(url: str, rules: Rules) -> SplitResult:
    """Refuse a URL by its looks: switched off, without a host, or with a private address written in it."""
    if not rules.http:
        raise Refused(
            "VALIDATION", f"sources by URL are switched off; start the node with {PREFIX}HTTP=1, or upload the file"
        )
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise Refused("VALIDATION", f"{url} is not a usable URL: {error}") from None
    if parts.scheme not in ("http", "https") or not host or any(c <= " " or c == "\x7f" for c in url):
        raise Refused("VALIDATION", f"{url} is not a usable URL; write something like https://host/video.mp4")
    if not parts.netloc.isascii():
        raise Refused("VALIDATION", f"the host of {url} must be in ASCII; write its name as xn--…")
    if (literal := _literal(host)) is not None:
        _allow([literal], host, rules)
    return parts


def download(url: str, rules: Rules, to: Path, pulse: Callable[[], None]) -> Path:
    """The URL's bytes in the file `to`. `pulse` is called between pieces and may raise to end it."""
    for _ in range(_REDIRECTS + 1):
        connection = _connect(check(url, rules), rules)
        try:
            response = _ask(connection, url)
            if response.status not in _MOVED:
                _save(response, url, rules, to, pulse)
                return to
            url = urljoin(url, response.headers.get("Location") or "")
        finally:
            connection.close()
        pulse()
    raise Refused("UNREADABLE_SOURCE", f"{url} was redirected more than {_REDIRECTS} times; give the final address")


def is_public(address: Address) -> bool:
    """Whether the address is somewhere in the internet, also after unwrapping IPv4 that is written as IPv6."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast and not address.is_reserved


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _allow(addresses: list[Address], host: str, rules: Rules) -> None:
    inside = [a for a in addresses if not is_public(a)]
    if inside and not rules.http_private:
        raise Refused(
            "VALIDATION",
            f"{host} is at {inside[0]}, an address that is not public; such sources are refused unless {PREFIX}HTTP_PRIVATE=1",
        )


def _connect(parts: SplitResult, rules: Rules) -> http.client.HTTPConnection:
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    sock = _reach(_addresses(host, port, rules), port, rules.http_timeout)
    if parts.scheme == "https":
        try:
            sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host)
        except BaseException:
            sock.close()
            raise
    connection = http.client.HTTPConnection(host, port, timeout=rules.http_timeout)
    connection.sock = sock  # connected already: http.client makes no connection, and no look-up, of its own
    connection.auto_open = 0
    return connection


def _addresses(host: str, port: int, rules: Rules) -> list[Address]:
    """What the name stands for, all of it judged. A name that does not resolve may do so later: that passes as OSError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise Refused("VALIDATION", f"{host!r:.100} is not a usable name of a host") from None
    addresses = [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]
    _allow(addresses, host, rules)
    return addresses


def _reach(addresses: list[Address], port: int, timeout: float) -> socket.socket:
    """A connection to the first of the addresses that answers."""
    last: OSError = OSError("no address")
    for address in addresses:
        try:
            return socket.create_connection((str(address), port), timeout=timeout)
        except OSError as error:
            last = error
    raise last


def _ask(connection: http.client.HTTPConnection, url: str) -> http.client.HTTPResponse:
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    host = parts.netloc.rpartition("@")[2]
    headers = {"Host": host, "User-Agent": "ostler-clips", "Accept-Encoding": "identity", "Connection": "close"}
    connection.request("GET", quote(target, safe="%/?:@!$&'()*+,;=~[]"), headers=headers)
    return connection.getresponse()


def _save(response: http.client.HTTPResponse, url: str, rules: Rules, to: Path, pulse: Callable[[], None]) -> None:
    _judge(response.status, url)
    promised = response.length
    if promised is not None:
        rules.check_size(promised, url)
    size = 0
    with to.open("wb") as file:
        while piece := response.read(_CHUNK):
            size += len(piece)
            rules.check_size(size, f"{url} (so far)")
            file.write(piece)
            pulse()
    if promised is not None and size < promised:
        raise Retry(f"{url} broke off after {size} of {promised} bytes")


def _judge(status: int, url: str) -> None:
    if status == 200:
        return
    if 400 <= status < 500 and status not in _PASSING:
        raise Refused(
            "UNREADABLE_SOURCE", f"{url} answers {status} {http.client.responses.get(status, '')}; check the address"
        )
    raise Retry(f"{url} answers {status} {http.client.responses.get(status, '')}")
