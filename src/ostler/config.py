"""Settings: code < ostler.toml < environment (OSTLER_<KEY>) < flags. Every relation between them is checked here, once.

Standard library alone: producers and workers read the same settings as the node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ostler.errors import ConfigError
from ostler.names import is_pool_name, pool_name
from ostler.settings import (
    ENV_KEYS,
    NODE_KEYS,
    POOL_KEYS,
    PRIORITIES,
    SESSION_KEYS,
    TOKEN_KEYS,
    EnvSettings,
    PoolSettings,
    Settings,
    TokenSettings,
)

__all__ = [
    "ENV_KEYS", "NODE_KEYS", "POOL_KEYS", "PRIORITIES", "SESSION_KEYS", "EnvSettings", "PoolSettings", "Settings", "TokenSettings",
    "check", "check_pool", "described", "is_loopback", "is_strange", "load", "parse_pools", "strangers",
]  # fmt: skip

_ENV_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}", re.IGNORECASE)
_VERSION = re.compile(r"3\.\d{1,2}(\.\d{1,2})?")


# Variables that Ostler itself gives to workers, the one that names the settings file, and GPUs for tests.
_INTERNAL = frozenset(
    {"component", "control", "family", "node", "config", "origin", "label", "env", "fake_gpus", "calls"}
)


# Variables of the apps that come with Ostler, and of descriptors that workers inherit.
_APPS = ("browser", "clips_", "music_", "models_", "fd_")
_SHORTEST_SECRET = 16  # characters of a token
_SHORTEST_PART = 5  # letters of a word that a misspelt name is compared with


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    code: Mapping[str, Any] | None = None,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Merge all sources and check the result; raises ConfigError with one sentence that names the source."""
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {k: v for k, v in (code or {}).items() if v is not None}
    pools: dict[str, dict[str, Any]] = {}
    _from_toml(values, pools, file or file_of(environ), required=file is not None or bool(environ.get("OSTLER_CONFIG")))
    _from_environment(values, pools, environ)
    for key, value in (flags or {}).items():
        if value is None:
            continue
        if key == "pools":
            for name, size in value.items():
                pools.setdefault(name, {})["workers"] = size
        else:
            values[key] = _typed(NODE_KEYS, key, value, f"--{key.replace('_', '-')}")
    settings = replace(Settings(), **values, pools={name: PoolSettings(**table) for name, table in pools.items()})
    check(settings)
    return settings


def file_of(environ: Mapping[str, str]) -> Path:
    """The settings file, where none is given by a flag."""
    return Path(environ.get("OSTLER_CONFIG") or "ostler.toml")


def _from_toml(values: dict[str, Any], pools: dict[str, dict[str, Any]], path: Path, *, required: bool) -> None:
    if not path.exists():
        if required:
            raise ConfigError(f"the settings file {path} does not exist")
        return
    try:
        import tomllib  # noqa: PLC0415  workers seldom read a file, and start faster without it

        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of TOML, or of UTF-8
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    for name, pool in _tables(table, "pools", path):
        if not isinstance(pool, dict):
            raise ConfigError(f"{path}: [pools.{name}] must be a table, such as [pools.{name}] workers = 2")
        pools[name] = {k: _typed(POOL_KEYS, k, v, f"{path}: pools.{name}.{k}") for k, v in pool.items()}
    values["file"] = str(path)
    values["envs"] = {
        name: described(name, env, path.absolute().parent, f"{path}: [env.{name}]")
        for name, env in _tables(table, "env", path)
    }
    values["tokens"] = {
        name: _token(name, given, f"{path}: [tokens.{name}]") for name, given in _tables(table, "tokens", path)
    }
    for key, value in table.items():
        values[key] = _typed(NODE_KEYS, key, value, f"{path}: {key}")


def _tables(table: dict[str, Any], key: str, path: Path) -> list[tuple[str, Any]]:
    found = table.pop(key, {})
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: {key} must be a table of tables, [{key}.NAME], found {found!r}")
    return list(found.items())


def _token(name: str, table: Any, source: str) -> TokenSettings:
    """A token's settings, checked. Raises ConfigError; no message shows a secret."""
    if not _ENV_NAME.fullmatch(name):
        raise ConfigError(f"{source}: a token's name may have letters, digits, '_' and '-', at most 63, found {name!r}")
    if not isinstance(table, Mapping):
        raise ConfigError(f'{source} must be a table, such as [tokens.{name}] secret = "…", pools = ["chromium"]')
    if strange := next((key for key in table if key not in TOKEN_KEYS), None):
        raise ConfigError(f"{source}: {strange!r} is not a key of a token; known: {', '.join(TOKEN_KEYS)}")
    secret, pools = table.get("secret"), table.get("pools", [])
    sessions, priority = table.get("sessions", 0), table.get("priority", 0)
    if not isinstance(secret, str) or len(secret) < _SHORTEST_SECRET or not secret.isascii() or " " in secret:
        raise ConfigError(
            f"{source}: secret must be text of at least {_SHORTEST_SECRET} ASCII characters without spaces"
        )
    if not isinstance(pools, list) or not all(isinstance(pool, str) for pool in pools):
        raise ConfigError(f'{source}: pools must be a list of names, such as ["chromium"], found {pools!r}')
    if type(sessions) is not int or sessions < 0:
        raise ConfigError(f"{source}: sessions must be a whole number of at least 0, found {sessions!r}")
    if type(priority) is not int or priority not in PRIORITIES:
        raise ConfigError(f"{source}: priority must be a whole number from -100 to 100, found {priority!r}")
    return TokenSettings(secret, tuple(pools), sessions, priority)


def described(name: str, table: Any, folder: Path, source: str) -> EnvSettings:
    """An environment's description, checked; relative paths count from `folder`. Raises ConfigError."""
    if not isinstance(name, str) or not _ENV_NAME.fullmatch(name):
        raise ConfigError(
            f"{source}: {name!r} cannot be the name of an environment; use letters, digits, '_' and '-', at most 63"
        )
    if not isinstance(table, Mapping):
        raise ConfigError(f'{source} must be a table, such as [env.{name}] requirements = ["numpy==2.3.1"]')
    values = {key: _of_env(key, value, source) for key, value in table.items() if value is not None}
    if "path" in values and len(values) > 1:
        other = min(values.keys() - {"path"})
        raise ConfigError(f"{source}: path names an existing environment, so {other} cannot be used with it")
    if values.get("installer", "pip") not in ("pip", "uv"):
        raise ConfigError(f"{source}: installer must be pip or uv, found {values['installer']!r}")
    python = values.get("python", "")
    if python and "/" not in python and not _VERSION.fullmatch(python):
        raise ConfigError(
            f"{source}: python must be a version such as 3.12 or the path of an interpreter, found {python!r}"
        )
    files = [key for key in ("requirements", "constraints", "path", "python") if isinstance(values.get(key), str)]
    for key in files:
        if key != "python" or "/" in python:
            values[key] = os.path.normpath(folder / Path(values[key]).expanduser())
    return EnvSettings(**values, folder=str(folder))


def _of_env(key: str, value: Any, source: str) -> Any:
    if key not in ENV_KEYS:
        close = _close_matches(key, list(ENV_KEYS), 0.6)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(ENV_KEYS)}"
        raise ConfigError(f"{source}: {key!r} is not a key of an environment; {hint}")
    lines = key in ("requirements", "extra_index", "no_deps")
    if lines and isinstance(value, list | tuple) and all(isinstance(v, str) and v.strip() for v in value):
        return tuple(v.strip() for v in value)
    if isinstance(value, Path):
        value = str(value)
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"{source}: {key} must be text{' or a list of texts' if lines else ''}, found {value!r}")
    return (value.strip(),) if key in ("extra_index", "no_deps") else value.strip()


def _from_environment(values: dict[str, Any], pools: dict[str, dict[str, Any]], environ: Mapping[str, str]) -> None:
    for variable, text in environ.items():
        key = variable.removeprefix("OSTLER_").lower()
        if not variable.startswith("OSTLER_"):
            continue
        if key == "pools":
            for name, size in parse_pools(text.split(","), variable).items():
                pools.setdefault(name, {})["workers"] = size
        elif key in NODE_KEYS:
            values[key] = _typed(NODE_KEYS, key, text, variable)
        elif is_strange(key) and (close := _closest(key)):
            # An app may have variables of its own, so only what looks like a setting is refused.
            raise ConfigError(f"environment variable {variable} is unknown; did you mean OSTLER_{close.upper()}?")


def is_strange(key: str) -> bool:
    """Whether OSTLER_<KEY> is no setting, no variable of a shipped app and none that Ostler itself sets."""
    return key not in NODE_KEYS and key != "pools" and key not in _INTERNAL and not key.startswith(_APPS)


def strangers(environ: Mapping[str, str] | None = None) -> list[str]:
    """One warning for each OSTLER_ variable that nothing of Ostler reads."""
    names = sorted(os.environ if environ is None else environ)
    found = [n for n in names if n.startswith("OSTLER_") and is_strange(n.removeprefix("OSTLER_").lower())]
    return [
        f"environment variable {name} is not a setting of Ostler; docs/settings.md lists them all" for name in found
    ]


def _close_matches(key: str, names: list[str], cutoff: float) -> list[str]:
    import difflib  # noqa: PLC0415  only for a mistake

    return difflib.get_close_matches(key, names, 1, cutoff)


def _closest(key: str) -> str | None:
    """The setting that was probably meant: close to its name, or to some words of it (HEARTBEET is heartbeat_interval)."""
    if close := _close_matches(key, [*NODE_KEYS, "pools"], 0.75):
        return close[0]
    parts: dict[str, str] = {}
    for name in NODE_KEYS:
        words = name.split("_")
        for first in range(len(words)):
            for last in range(first + 1, len(words) + 1):
                part = "_".join(words[first:last])
                if len(part) >= _SHORTEST_PART:
                    parts.setdefault(part, name)
    close = _close_matches(key, list(parts), 0.8)
    return parts[close[0]] if close else None


def parse_pools(pairs: list[str] | tuple[str, ...], source: str) -> dict[str, int]:
    """`tag=2` pairs as sizes by name."""
    sizes = {}
    for pair in pairs:
        name, equals, size = pair.strip().partition("=")
        if not equals or not size.strip().isdecimal() or not is_pool_name(name.strip()):
            raise ConfigError(f"{source}: {pair!r} is not a pool size; write name=number, such as tag=2")
        sizes[name.strip()] = int(size)
    return sizes


def _typed(known: Mapping[str, Any], key: str, value: Any, source: str) -> Any:
    if key not in known:
        close = _close_matches(key, [*known, "pools", "env"], 0.6)
        hint = f"; did you mean {close[0]!r}?" if close else "; docs/settings.md lists them all"
        raise ConfigError(f"{source} is not a known setting{hint}")
    kind = str(known[key].type).partition(" | ")[0]
    try:
        return _convert(kind, value)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{source} must be {_ARTICLE[kind]}, found {value!r}") from error


_ARTICLE = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
_TRUTH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _convert(kind: str, value: Any) -> Any:
    if kind == "bool":
        return value if isinstance(value, bool) else _TRUTH[str(value).strip().lower()]
    if isinstance(value, bool):
        raise TypeError
    if kind == "int":
        if isinstance(value, float):
            raise TypeError
        return int(value)
    if kind == "float":
        return float(value)
    if not isinstance(value, str | Path):
        raise TypeError
    return str(value)


def check(settings: Settings) -> None:
    """Refuse what cannot work, with the relation that is broken."""
    _check_tokens(settings)
    for key in NODE_KEYS:
        value = getattr(settings, key)
        if isinstance(value, int | float) and not isinstance(value, bool) and (value < 0 or value != value):  # noqa: PLR0124  NaN
            raise ConfigError(f"{key} must not be negative, found {value}")
    for key in (
        "heartbeat_interval",
        "startup_deadline",
        "restart_window",
        "backoff_max",
        "poll_interval",
        "store_patience",
        "max_payload",
        "upkeep_interval",
        "event_keepalive",
    ):
        if not getattr(settings, key) > 0:
            raise ConfigError(f"{key} must be more than 0, found {getattr(settings, key)}")
    for key in ("restart_limit", "restart_lifetime"):
        if getattr(settings, key) < 1:
            raise ConfigError(f"{key} must be at least 1, found {getattr(settings, key)}")
    _check_stale("stale_after", settings.stale_after, settings.heartbeat_interval)
    _check_stale("node_lease", settings.node_lease, settings.heartbeat_interval)
    if settings.registry:
        _check_registry(settings)
    if not 0 <= settings.port <= 65535:
        raise ConfigError(f"port must be between 0 and 65535, found {settings.port}")
    if settings.max_payload > 16 * 1024 * 1024:
        raise ConfigError(
            f"max_payload must be at most 16777216 (16 MiB), found {settings.max_payload}; put larger data into files and pass their paths"
        )
    if settings.log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"log_level must be debug, info, warning or error, found {settings.log_level!r}")
    if settings.log_format not in ("text", "json"):
        raise ConfigError(f"log_format must be text or json, found {settings.log_format!r}")
    if not is_loopback(settings.host) and not settings.token:
        raise ConfigError(
            f"host {settings.host} can be reached from other machines, which requires a token: set OSTLER_TOKEN, or listen on 127.0.0.1"
        )
    for name, pool in settings.pools.items():
        check_pool(settings, name, pool)


def _check_tokens(settings: Settings) -> None:
    """A secret says who comes: no two may have the same."""
    known = {settings.token: "the node's token"} if settings.token else {}
    for name, token in settings.tokens.items():
        if other := known.get(token.secret):
            raise ConfigError(f"[tokens.{name}]: {other} and {name} have the same secret; each needs its own")
        known[token.secret] = name


def check_pool(settings: Settings, name: str, pool: PoolSettings) -> None:
    """Refuse what a pool cannot have, wherever it was set."""
    pool_name(name)
    for key in POOL_KEYS:
        value = getattr(pool, key)
        if isinstance(value, int | float) and value < 0:
            raise ConfigError(f"pools.{name}.{key} must not be negative, found {value}")
    if pool.stale_after is not None:
        _check_stale(f"pools.{name}.stale_after", pool.stale_after, settings.heartbeat_interval)


def _check_stale(key: str, stale: float, beat: float) -> None:
    if stale < 3 * beat - 1e-9:
        raise ConfigError(
            f"{key} ({stale:g} s) must be at least 3 x heartbeat_interval ({beat:g} s), or one late heartbeat would kill a healthy worker"
        )


def _check_registry(settings: Settings) -> None:
    if settings.registry_attempts < 1:
        raise ConfigError(f"registry_attempts must be at least 1, found {settings.registry_attempts}")
    beat, ttl = "heartbeat_interval", "registry_key_ttl"
    for less, more, then in (
        (beat, ttl, "healthy workers would look dead"),
        (beat, "registry_command_ttl", "commands would expire before they are seen"),
        (ttl, "registry_command_ttl", "a command could expire before a briefly disconnected worker sees it"),
        (ttl, "registry_sweep", "the sweep would run before any worker can have expired"),
    ):
        low, high = getattr(settings, less), getattr(settings, more)
        if not low < high:
            raise ConfigError(f"{less} ({low:g} s) must be less than {more} ({high:g} s), or {then}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        import ipaddress  # noqa: PLC0415  only for an address in figures

        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
