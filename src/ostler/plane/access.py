"""Who may use the node: those with its token, on loopback also its own user and root, and no web page of another site.

One decision for both servers: the node's gate and the data plane. Other nodes of the same store know a secret that is in the
store. With it they may read the inner routes and pass on calls, and nothing else.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from ostler import private
from ostler.config import PRIORITIES, Settings, is_loopback

COOKIE = "ostler_token"

# The data plane tells the node for whom it asks. The node believes it on its own Unix socket alone, and the data plane takes
# these headers out of what clients send.
PEER_HEADER, CLIENT_HEADER = b"x-ostler-peer", b"x-ostler-client"

# Open without a token: probes, the way in, and the dashboard's files, which hold no data.
_OPEN = ("/healthz", "/readyz", "/login")
_FILES = "/ui/"
_INNER = "/api/v1/inner/"
_CALLS = ("/api/v1/calls/", "/v1/")
SESSIONS = "/sessions/"
OWNER = b"x-ostler-owner"  # for whom a node passes a session on
BY = b"ostler-forwarded-by"
_FORWARDED = (b"forwarded", b"x-forwarded-for", b"x-real-ip")

Headers = Sequence[tuple[bytes, bytes]]  # names in lower case


def token(settings: Settings) -> str:
    """The node's token: the configured one, or its own in the data directory."""
    return settings.token or private.token(settings.data_dir)


class Refusal(NamedTuple):
    status: int
    code: str
    message: str


class Caller(NamedTuple):
    """Who opens sessions, and what it may."""

    owner: str
    pools: frozenset[str] = frozenset()  # names; none: all
    sessions: int = 0  # at once; 0: no limit
    priority: int = PRIORITIES[-1]  # the highest
    via: str | None = None  # the node that passes it on


@dataclass(frozen=True, slots=True)
class Token:
    """One that may open sessions and nothing else (`[tokens.NAME]`)."""

    name: str
    secret: str
    pools: list[str]
    sessions: int
    priority: int

    @property
    def caller(self) -> Caller:
        return Caller(f"token:{self.name}", frozenset(self.pools), self.sessions, self.priority)


@dataclass(frozen=True, slots=True)
class Access:
    """The rule, as plain data: it travels to the data plane over the control channel (`asdict`, `Access.read`)."""

    token: str
    secret: str  # of the nodes of the store; empty: there are no inner routes
    loopback: bool
    public: frozenset[str]  # names under which a reverse proxy serves the node
    friends: frozenset[int]  # users that need no token
    key: str = ""  # of the node's workers, which may call models and nothing else; empty: there is none
    tokens: tuple[Token, ...] = ()

    @classmethod
    def of(cls, settings: Settings, secret: str = "", key: str = "") -> Access:
        loopback = is_loopback(settings.host)
        public = frozenset(name.strip().lower() for name in settings.public.split(",") if name.strip())
        # Users are told apart only where everybody is on this machine, and not behind a proxy: there, all come as its user.
        trusts = loopback and not settings.token and not public
        friends = frozenset({0, os.geteuid()}) if trusts else frozenset[int]()
        tokens = tuple(Token(n, t.secret, [*t.pools], t.sessions, t.priority) for n, t in settings.tokens.items())
        return cls(token(settings), secret, loopback, public, friends, key, tokens)

    def frame(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**asdict(self), "public": sorted(self.public), "friends": sorted(self.friends)}

    @classmethod
    def read(cls, frame: dict[str, Any]) -> Access:
        sets = {"public": frozenset(frame["public"]), "friends": frozenset(frame["friends"])}
        return cls(**{**frame, **sets, "tokens": tuple(Token(**token) for token in frame["tokens"])})

    def refusal(self, method: str, path: str, query: bytes, headers: Headers, peer: int | None) -> Refusal | None:
        """Why the request is not taken; None when it is. `peer`: the user whose process has connected, where that is known."""
        first = dict(reversed(headers))  # of several, the first counts
        if self._is_node(method, path, first):
            return None  # it may know us by a name that no client uses
        if why := self._strange_page(method, first):
            return why
        given = _given(query, headers, first)
        if is_open(path) or self._is_friend(peer, first) or any(_same(one, self.token) for one in given):
            return None
        if self.key and path.startswith(_CALLS) and any(_same(one, self.key) for one in _bearer(first)):
            return None
        if named := self._named(given):
            return Refusal(403, "FORBIDDEN", f"the token {named.name!r} can only open sessions")
        return _UNKNOWN

    def caller(self, method: str, path: str, query: bytes, headers: Headers, peer: int | None) -> Caller | Refusal:
        """Who wants a session; for the pools that it may have, see there."""
        first = dict(reversed(headers))
        if self._is_node(method, path, first):
            via, owner = (first.get(name, b"").decode("latin-1") for name in (BY, OWNER))
            return Caller(owner or f"node:{via}", via=via)
        if why := self._strange_page("POST", first):  # a session changes things, whatever its method is
            return why
        given = _given(query, headers, first)
        if any(_same(one, self.token) for one in given):
            return Caller("token")
        if named := self._named(given):
            return named.caller
        return Caller(f"user:{peer}") if self._is_friend(peer, first) else _UNKNOWN

    def _named(self, given: list[str]) -> Token | None:
        return next((token for token in self.tokens if any(_same(one, token.secret) for one in given)), None)

    def _strange_page(self, method: str, first: dict[bytes, bytes]) -> Refusal | None:
        """Why a request is not taken whatever it knows: it comes from a page of another site, or under a strange name."""
        host = first.get(b"host", b"").decode("latin-1")
        origin = first.get(b"origin", b"").decode("latin-1")
        # A page from elsewhere can make a browser send requests here; it cannot hide where it comes from.
        if self.loopback and host and not is_loopback(host_name(host)) and host_name(host) not in self.public:
            return Refusal(
                403,
                "FORBIDDEN_HOST",
                f"this node listens on loopback, and {host!r} is not one of its names; behind a reverse proxy, set `public`",
            )
        if origin and origin != "null" and not self._is_own(origin.partition("://")[2], host):
            return Refusal(403, "FORBIDDEN_ORIGIN", f"requests from pages of {origin} are not allowed")
        if origin == "null" and method not in ("GET", "HEAD"):
            return Refusal(403, "FORBIDDEN_ORIGIN", "requests from pages without an origin are not allowed")
        return None

    def _is_node(self, method: str, path: str, first: dict[bytes, bytes]) -> bool:
        """Whether another node of the store reads an inner route, or passes on a call or a session."""
        passes_on = path.startswith((*_CALLS, SESSIONS)) and BY in first
        if not self.secret or not (passes_on or (method == "GET" and path.startswith(_INNER))):
            return False
        return any(_same(given, self.secret) for given in _bearer(first))

    def _is_own(self, origin: str, host: str) -> bool:
        return origin == host or host_name(origin) in self.public

    def _is_friend(self, peer: int | None, first: dict[bytes, bytes]) -> bool:
        """Whether the node's own user or root has connected, and not for somebody else."""
        return peer in self.friends and not any(name in first for name in _FORWARDED)


_UNKNOWN = Refusal(
    401, "UNAUTHORIZED", "a token is required: send the header 'Authorization: Bearer …' (`ostler token` prints it)"
)


def is_open(path: str) -> bool:
    """Whether anybody may ask for it."""
    return path in _OPEN or path.startswith(_FILES)


def _bearer(first: dict[bytes, bytes]) -> list[str]:
    """The token of an Authorization header. What clients send is UTF-8."""
    given = first.get(b"authorization", b"")
    return [given[7:].decode(errors="replace")] if given[:7].lower() == b"bearer " else []


def _given(query: bytes, headers: Headers, first: dict[bytes, bytes]) -> list[str]:
    """All tokens that a request carries."""
    found = _bearer(first) + parse_qs(query.decode("latin-1")).get("token", [])
    for name, line in headers:
        if name == b"cookie":
            found += cookies(line.decode("latin-1"))
    return found


def _same(given: str, wanted: str) -> bool:
    """In a time that tells nothing."""
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())


def cookies(line: str) -> list[str]:
    """The values of our cookie in a Cookie header. Cookies of other programs on this host come along, in any shape."""
    pairs = (part.strip().partition("=") for part in line.split(";"))
    return [form for name, _, value in pairs if name == COOKIE for form in (value, unquote(value))]


def host_name(host: str) -> str:
    """The name in a Host header, without its port; empty when it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:  # brackets that are no IPv6 address
        return ""


# ---- for whom the data plane asks


def tell(peer: int | None, client: tuple[str, int] | None) -> bytes:
    """The two headers, as lines of a head."""
    who = b"-" if peer is None else b"%d" % peer
    where = f"{client[0]}:{client[1]}".encode() if client else b"-"
    return PEER_HEADER + b": " + who + b"\r\n" + CLIENT_HEADER + b": " + where + b"\r\n"


def read_peer(said: bytes | None) -> int | None:
    return int(said) if said and said.isdigit() else None


def read_client(said: bytes | None) -> tuple[str, int] | None:
    host, _, port = (said or b"").decode("latin-1").rpartition(":")
    return (host, int(port)) if host and port.isdigit() else None
