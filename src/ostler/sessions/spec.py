"""What a user's file declares of sessions, as plain data. Everything is checked here, at declaration. Standard library alone."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from ostler.errors import ConfigError
from ostler.names import pool_name

_RESERVED = ("plane",)  # pools of the node's own


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker takes connections: `address` is the path of a Unix socket, `tcp:PORT` or `tcp:HOST:PORT`; `path` is where it
    takes the upgrade. `versions` are the clients' versions (major.minor) that it serves, as `product/VERSION` in their User-Agent;
    empty: all. `cdp` is the answer to `/json/version`, where it speaks CDP. `lends` is the path of a Unix socket on which it takes clients'
    own connections, if it does: busy clients are then served without a hop. The browser grid does that; the protocol is in `sessions/lending.py`.
    """

    address: str
    path: str = "/"
    versions: Sequence[str] = ()
    product: str = ""
    cdp: Mapping[str, Any] | None = None
    lends: str = ""

    def frame(self) -> dict[str, Any]:
        """As it travels to the node."""
        return {**dataclasses.asdict(self), "versions": list(self.versions)}

    @classmethod
    def of(cls, given: object) -> Endpoint:
        """What a worker announced: an Endpoint, or an address alone. Raises TypeError."""
        if isinstance(given, Endpoint):
            return given
        if isinstance(given, str) and given:
            return cls(given)
        raise TypeError(f"an endpoint is the path of a socket, 'tcp:PORT' or an ostler.Endpoint, found {given!r}")


class Options(TypedDict, total=False):
    """The options of sessions as they are written."""

    slots: int
    lifetime: int
    margin: int
    line: int
    line_wait: float
    idle: float
    longest: float
    ping: float
    drain: float
    probe: float
    slow_ms: float
    sticky: float
    redirect: bool
    protocol: str
    serves: str | None
    versions: Sequence[str]
    product: str
    memory_mb: float
    env: str | None


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """How the sessions of a pool are served. Times are seconds; 0 switches a limit off."""

    slots: int = 5  # sessions at once in one worker
    lifetime: int = 50  # sessions after which a worker is replaced
    margin: int = 5  # so many before that its replacement is started, and it is chosen last
    line: int = 100  # clients that may wait; more are refused
    line_wait: float = 30.0  # the longest wait
    idle: float = 600.0  # without a byte either way
    longest: float = 21_600.0  # in all
    ping: float = 20.0  # how often a quiet client is asked whether it is there
    drain: float = 30.0  # what sessions get to end when their worker leaves
    probe: float = 1.0  # how often a worker is asked whether it is well; two misses in a row: it hangs
    slow_ms: float = 0.0  # a worker whose probe takes longer than this, again and again, is replaced
    sticky: float = 0.0  # how long a session that has a key waits for its client to come back
    redirect: bool = False  # send clients to the worker instead of relaying them
    protocol: str = "websocket"  # or tcp
    serves: str = ""  # the name that clients use; several pools may have the same
    versions: tuple[str, ...] = ()  # clients' versions that it serves; empty: what the worker announces
    product: str = ""
    memory_mb: float = 0.0
    env: str | None = None


_FIELDS = {f.name: f for f in dataclasses.fields(SessionOptions)}
_WHOLE = {"slots": (1, 10_000), "lifetime": (0, 10_000_000), "margin": (0, 10_000), "line": (0, 100_000)}
_SECONDS = ("line_wait", "idle", "longest", "ping", "drain", "probe", "slow_ms", "sticky", "memory_mb")


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """One declared pool of sessions. `target` is a class or a function; a program has `argv` instead."""

    name: str
    target: Any
    options: SessionOptions
    argv: tuple[str, ...] = ()
    ready: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None
    path: str = "/"  # of a program: where it takes the upgrade

    @property
    def is_program(self) -> bool:
        return self.target is None

    @property
    def serves(self) -> str:
        """The name that clients use."""
        return self.options.serves or self.name

    def with_options(self, **changed: Any) -> SessionSpec:
        """With what the settings say; raises ConfigError."""
        given = {name: value for name, value in changed.items() if value is not None}
        if lifetime := given.get("lifetime"):
            given["margin"] = min(self.options.margin, lifetime // 2)
        return dataclasses.replace(self, options=_checked(self.name, {**_as_dict(self.options), **given}))

    def terms(self) -> dict[str, Any]:
        """What the data plane needs to know."""
        names = ("slots", "lifetime", "margin", "line", "line_wait", "idle", "longest", "ping", "redirect", "protocol")
        known = _as_dict(self.options)
        rest = {"sticky": known["sticky"], "versions": list(known["versions"]), "product": known["product"]}
        return {name: known[name] for name in names} | rest | {"serves": self.serves}


def _as_dict(options: SessionOptions) -> dict[str, Any]:
    return {name: getattr(options, name) for name in _FIELDS}


def declare(name: str, target: Any, given: Mapping[str, Any]) -> SessionSpec:
    """A pool whose workers run that class or async generator function; raises ConfigError."""
    _check_name(name)
    if inspect.isclass(target):
        if not callable(getattr(target, "start", None)):
            raise ConfigError(f"sessions {name!r}: the class {target.__name__} has no method start(self, worker)")
    elif not inspect.isasyncgenfunction(target):
        raise ConfigError(
            f"sessions {name!r}: decorate a class with start(self, worker), or an async function that yields its endpoint; found {target!r}"
        )
    return SessionSpec(name, target, _checked(name, given))


def declare_program(
    name: str,
    argv: Sequence[str],
    ready: str | None,
    given: Mapping[str, Any],
    *,
    variables: Mapping[str, str] | None = None,
    cwd: str | None = None,
    path: str = "/",
) -> SessionSpec:
    """A pool whose workers are that command; raises ConfigError."""
    _check_name(name)
    if not argv or isinstance(argv, str) or not all(isinstance(a, str) for a in argv):
        raise ConfigError(f"endpoint {name!r}: argv must be a list of strings, found {argv!r}")
    texts = [*argv, *(variables or {}).values()]
    if not any("{port}" in text or "{socket}" in text for text in texts):
        raise ConfigError(
            f"endpoint {name!r}: put {{port}} or {{socket}} into argv or variables, so that it knows where to listen"
        )
    if not path.startswith("/"):
        raise ConfigError(f"endpoint {name!r}: path must begin with '/', found {path!r}")
    options = _checked(name, given)
    if options.redirect:
        raise ConfigError(f"endpoint {name!r}: redirect needs a worker that checks tickets; use @app.sessions")
    if options.env is not None:
        raise ConfigError(f"endpoint {name!r}: a program cannot have an env; put the path of its interpreter into argv")
    return SessionSpec(name, None, options, tuple(argv), ready, dict(variables or {}), cwd, path)


def _check_name(name: str) -> None:
    pool_name(name)
    if name in _RESERVED:
        raise ConfigError(f"sessions {name!r}: this name is reserved for the node; choose another")


def _checked(name: str, given: Mapping[str, Any]) -> SessionOptions:
    values = {key: value for key, value in given.items() if value is not None}
    if unknown := values.keys() - _FIELDS.keys():
        raise ConfigError(f"sessions {name!r}: {min(unknown)!r} is not an option; known: {', '.join(sorted(_FIELDS))}")
    for key, (least, most) in _WHOLE.items():
        value = values.get(key, least)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(
                f"sessions {name!r}: {key} must be a whole number from {least} to {most}, found {value!r}"
            )
    for key in _SECONDS:
        value = values.get(key, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9 or math.isnan(value):
            raise ConfigError(f"sessions {name!r}: {key} must be a number from 0, found {value!r}")
        if key in values:
            values[key] = float(value)
    if values.get("protocol", "websocket") not in ("websocket", "tcp"):
        raise ConfigError(f"sessions {name!r}: protocol must be 'websocket' or 'tcp', found {values['protocol']!r}")
    if not isinstance(values.get("redirect", False), bool):
        raise ConfigError(f"sessions {name!r}: redirect must be True or False, found {values['redirect']!r}")
    if values.get("serves"):
        pool_name(values["serves"])
    versions = values.get("versions", ())
    if isinstance(versions, str) or not all(isinstance(v, str) and v for v in versions):
        raise ConfigError(f"sessions {name!r}: versions must be a list of texts such as '1.65', found {versions!r}")
    values["versions"] = tuple(versions)
    found = SessionOptions(**values)
    if found.lifetime and found.margin >= found.lifetime:
        if given.get("margin", SessionOptions().margin) != SessionOptions().margin:
            raise ConfigError(
                f"sessions {name!r}: margin ({found.margin}) must be less than lifetime ({found.lifetime}), or its workers would be replaced before they serve anyone"
            )
        found = dataclasses.replace(found, margin=found.lifetime // 2)  # the default, with a short lifetime
    if found.redirect and found.protocol == "tcp":
        raise ConfigError(f"sessions {name!r}: redirect is for WebSocket clients; use it without protocol='tcp'")
    return found
