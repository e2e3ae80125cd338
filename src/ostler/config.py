"""Settings: code < ostler.toml < environment (OSTLER_<KEY>) < flags. Every relation between them is checked here, once.

Standard library alone: producers and workers read the same settings as the node.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ostler.errors import ConfigError
from ostler.names import is_pool_name, pool_name

_ENV_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}", re.IGNORECASE)
_VERSION = re.compile(r"3\.\d{1,2}(\.\d{1,2})?")


# Variables that Ostler itself gives to workers, the one that names the settings file, and GPUs for tests.
_INTERNAL = frozenset(
    {"component", "control", "family", "node", "config", "origin", "label", "env", "fake_gpus", "calls"}
)


_APPS = (
    "browser",
    "clips_",
    "models_",
    "fd_",
)  # variables of the apps that come with Ostler, and of descriptors that workers inherit
_SHORTEST_PART = 5  # letters of a word that a misspelt name is compared with


def _setting(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """What may differ from pool to pool; None takes the node's setting. TOML: a table `[pools.<name>]`."""

    workers: int | None = _setting(None, "how many workers the pool has")
    startup_deadline: float | None = _setting(None, "seconds from spawn to ready")
    stale_after: float | None = _setting(None, "seconds without a heartbeat until a worker counts as hung")
    stop_grace: float | None = _setting(None, "seconds that running work gets when the worker is stopped")
    recycle_count: int | None = _setting(None, "recycle a worker after so many served items")
    recycle_age: float | None = _setting(None, "recycle a worker after so many seconds")
    recycle_rss_mb: float | None = _setting(None, "recycle a worker above so many MB of memory")
    recycle_warm: bool | None = _setting(None, "start the replacement before the old worker leaves")
    high_watermark: int | None = _setting(None, "backpressure: hold the queue above so many ready jobs; 0: off")
    env: str | None = _setting(None, "the environment that the queue's workers run in; default: the node's own")
    slots: int | None = _setting(None, "sessions: how many one worker holds at once")
    lifetime: int | None = _setting(None, "sessions: a worker is replaced after so many; 0: never")
    line: int | None = _setting(None, "sessions: how many clients may wait for a slot; more are refused")
    line_wait: float | None = _setting(None, "sessions: the longest wait for a slot, in seconds")
    idle: float | None = _setting(None, "sessions: one without a byte either way ends after so many seconds; 0: never")
    longest: float | None = _setting(None, "sessions: one ends after so many seconds in all; 0: never")
    drain: float | None = _setting(None, "sessions: seconds that they get to end when their worker leaves")
    redirect: bool | None = _setting(None, "sessions: send clients to the worker itself instead of relaying them")


@dataclass(frozen=True, slots=True)
class EnvSettings:
    """A virtual environment as it is described; None: not given. TOML: a table `[env.<name>]`. Paths in it are absolute."""

    python: str | None = _setting(
        None, "a version such as 3.12, or the path of an interpreter; default: the node's own Python"
    )
    requirements: str | tuple[str, ...] | None = _setting(
        None, "a requirements file (a lock file is one too), or a list of lines as in such a file"
    )
    constraints: str | None = _setting(None, "a constraints file: versions of whatever is installed come from there")
    no_deps: tuple[str, ...] | None = _setting(
        None, "packages that are installed after the others, without what they say that they need"
    )
    index: str | None = _setting(None, "the package index to use instead of PyPI")
    extra_index: tuple[str, ...] | None = _setting(None, "further package indexes: one, or a list")
    installer: str | None = _setting(None, "uv or pip; default: uv where it is found, else pip")
    path: str | None = _setting(
        None, "an environment of your own, which Ostler uses but neither builds nor removes; excludes all other keys"
    )
    folder: str = ""  # where relative paths in requirement lines begin

    @property
    def given(self) -> bool:
        return any(getattr(self, key) is not None for key in ENV_KEYS)


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """A token that may open sessions of some pools and do nothing else. TOML: a table `[tokens.<name>]`."""

    secret: str = _setting("", "what its holder sends as a bearer token or as `?token=`; at least 16 characters")
    pools: tuple[str, ...] = _setting((), "the names of pools whose sessions it may open; none: all")
    sessions: int = _setting(0, "so many sessions at once through one node, those that wait included; 0: no limit")
    priority: int = _setting(0, "the highest priority that its sessions may ask for, -100 to 100")


@dataclass(frozen=True, slots=True)
class Settings:
    """One node's settings. Durations are seconds."""

    name: str = _setting("", "the node's name; empty: the host's name")
    store: str = _setting(
        "",
        "where the records are: empty for SQLite in the data directory, sqlite:///path, or postgresql://user@host/database",
    )
    data: str = _setting(".ostler", "the data directory: database, logs, lock, doorbell")
    host: str = _setting("127.0.0.1", "the address to listen on; any but loopback needs a token")
    port: int = _setting(8356, "the port to listen on; 0 takes any free one")
    token: str = _setting(
        "",
        "the bearer token that requests must carry; empty: the node makes one in the data directory (`ostler token`), "
        "which its own user and root need not send on loopback",
    )
    group: str = _setting(
        "",
        "a group whose members may use the data directory too, for example to enqueue from a web app; empty: only the node's user",
    )
    public: str = _setting(
        "",
        "names under which a reverse proxy serves the node, comma-separated (jobs.example.org); then everybody sends the token",
    )
    advertise: str = _setting(
        "",
        "the URL by which other nodes reach this one (http://10.0.0.7:8356); empty: made of host and port, or nothing on loopback",
    )
    url: str = _setting(
        "",
        "the node that `app.call` and `ostler call` use, with `token`; empty: the one that runs on the data directory",
    )
    log_level: str = _setting("info", "debug, info, warning or error")

    workers: int = _setting(2, "workers of a pool that names no number of its own")
    heartbeat_interval: float = _setting(
        5.0, "seconds between heartbeats of a worker, and between writes of all heartbeats"
    )
    stale_after: float = _setting(
        30.0, "seconds without a heartbeat after which a worker counts as hung and is killed; at least 3 heartbeats"
    )
    node_lease: float = _setting(
        30.0,
        "a node whose heartbeat is older than this is declared dead by any other, and its jobs are requeued; at least 3 heartbeats",
    )
    startup_deadline: float = _setting(60.0, "a worker that is not ready by then is killed; that counts as a crash")
    stop_grace: float = _setting(10.0, "what running work gets when a worker or the node is stopped, before SIGTERM")
    term_grace: float = _setting(2.0, "from SIGTERM to SIGKILL")
    healthy_after: float = _setting(
        300.0, "healthy seconds after which the crash streak resets: the next delay is 1 s again"
    )
    restart_limit: int = _setting(5, "crashes within restart_window that mark a worker failed")
    restart_window: float = _setting(300.0, "the sliding window of restart_limit")
    restart_lifetime: int = _setting(20, "crashes in all that mark a worker failed")
    backoff_max: float = _setting(60.0, "the longest delay before a restart; it doubles from 1 s")
    recycle_count: int = _setting(0, "recycle each worker after so many served items; 0: never")
    recycle_age: float = _setting(0.0, "recycle each worker after so many seconds; 0: never")
    recycle_rss_mb: float = _setting(0.0, "recycle each worker above so many MB of memory; 0: never")
    recycle_warm: bool = _setting(False, "start the replacement before the recycled worker leaves")

    memory_headroom_mb: float = _setting(
        512.0, "host memory that is never given to workers with a memory need; it stays for the node and others"
    )
    gpu_headroom_mb: float = _setting(512.0, "memory of each GPU that is never given to workers")
    memory_patience: float = _setting(
        30.0, "a worker that has waited for memory this long is no longer overtaken, and job workers yield to it"
    )
    gpu_exclusive: bool = _setting(
        False, "of all models that use a GPU, one loads or answers a call at a time, whatever fits"
    )

    parked_for: float = _setting(
        3600.0, "a model that is parked (its device memory on the host) and not called for this long is ended"
    )

    poll_interval: float = _setting(1.0, "fallback look into the store, for a ring of the doorbell that was lost")
    cancel_grace: float = _setting(10.0, "what a running job gets to react to a cancel, before SIGTERM")
    retry_base: float = _setting(1.0, "delay before the second run of a failed job; it doubles with each further one")
    retry_max: float = _setting(300.0, "the longest delay before a job is run again")
    crash_limit: int = _setting(2, "re-runs of a job that took its worker down; one crash more makes it TOXIC")
    crash_delay: float = _setting(
        10.0, "delay before a job that crashed twice runs again, at the end of its queue; the first re-run is immediate"
    )
    job_nice: int = _setting(
        5, "added to the niceness of job workers where the app has models, so that calls come first; 0: all are equal"
    )
    max_payload: int = _setting(1_048_576, "the most bytes of a job's arguments or result, as JSON")
    max_body: int = _setting(67_108_864, "the most bytes of a call's body")
    store_patience: float = _setting(30.0, "how long an enqueue waits for a locked or full store before it is refused")
    results: str = _setting(
        "", "where jobs publish artifacts: empty for `results` in the data directory, a path, or a URL for fsspec"
    )
    env_dir: str = _setting("", "where environments are built: empty for `envs` in the data directory, or a path")
    scratch_max_age: float = _setting(604_800.0, "scratch of failed runs is deleted after so long")
    scratch_max_mb: float = _setting(10_000.0, "scratch of ended jobs is deleted, oldest first, above so many MB")
    high_watermark: int = _setting(
        0,
        "backpressure: hold a queue while more of its jobs than this are ready and other programs need the CPU; 0: off",
    )
    load_threshold: float = _setting(
        0.7, "backpressure: share of the CPU that other programs use (0 to 1, over 5 s) above which a queue is held"
    )
    backpressure_pause: float = _setting(3.0, "backpressure: seconds for which a queue is held")
    retry_jitter: float = _setting(0.1, "each retry delay is made longer or shorter by up to this share")
    retention: float = _setting(
        604_800.0,
        "done and cancelled jobs, with timeline, logs and artifacts' rows, are deleted after so long, except the newest job; 0: never",
    )
    failed_retention: float = _setting(2_592_000.0, "failed jobs are deleted after so long; 0: never")
    calls_retention: float = _setting(604_800.0, "rows of the call log are deleted after so long; 0: never")
    calls_kept: int = _setting(
        100_000, "so many rows of the call log are kept at most, the newest; 0: as many as there are"
    )
    sessions_retention: float = _setting(2_592_000.0, "rows of ended sessions are deleted after so long; 0: never")
    sessions_kept: int = _setting(
        100_000, "so many rows of ended sessions are kept at most, the newest; 0: as many as there are"
    )
    registry: str = _setting(
        "",
        "where sessions are admitted: empty for the store, or redis://host:6379/0 (also rediss://, unix://, valkey://) for Redis or Valkey",
    )
    registry_key_ttl: float = _setting(
        30.0,
        "Redis: a worker without a heartbeat for so long is gone; more than heartbeat_interval, less than the two below",
    )
    registry_command_ttl: float = _setting(
        60.0,
        "Redis: how long a command (`worker:cmd:…`) lives; what it asks for does not expire once a node has seen it",
    )
    registry_sweep: float = _setting(
        300.0, "Redis: how often each node looks for workers that are gone, and reaps them"
    )
    registry_attempts: int = _setting(5, "Redis: how often a node that starts tries to reach the server")
    registry_delay: float = _setting(3.0, "Redis: seconds between two of these attempts")
    upkeep_interval: float = _setting(60.0, "how often a node looks for stale nodes, old jobs, logs and scratch")
    exit_retention: float = _setting(2_592_000.0, "how long exit records of workers and incidents are kept")
    event_keepalive: float = _setting(15.0, "a stream of events that has nothing to say sends a comment this often")
    max_streams: int = _setting(2000, "so many streams of events and logs at once; more are refused with 503")

    pools: Mapping[str, PoolSettings] = field(default_factory=dict)
    envs: Mapping[str, EnvSettings] = field(default_factory=dict)
    tokens: Mapping[str, TokenSettings] = field(default_factory=dict)
    file: str = ""  # the configuration file that was read

    @property
    def data_dir(self) -> Path:
        return Path(self.data).expanduser().absolute()

    @property
    def node(self) -> str:
        return self.name or socket.gethostname()

    def pool(self, name: str, declared: PoolSettings | None = None) -> PoolSettings:
        """The pool's settings in full: its own, then what the code declared, then the node's."""
        own = self.pools.get(name, PoolSettings())
        values = {}
        for f in fields(PoolSettings):
            nodes = getattr(self, f.name) if f.name in NODE_KEYS else None
            found = (getattr(own, f.name), getattr(declared, f.name) if declared else None, nodes)
            values[f.name] = next((v for v in found if v is not None), None)
        return PoolSettings(**values)

    def env(self, name: str, declared: EnvSettings | None = None) -> EnvSettings | None:
        """The environment's description: what the file says of each key, then the code. None when neither names it.

        An environment of the user's own has nothing but its path, so there one of the two counts alone.
        """
        own = self.envs.get(name)
        if own is None or (declared is not None and not own.given):
            return declared
        if declared is None or own.path or declared.path:
            return own
        values = {k: v for k in ENV_KEYS if (v := getattr(own, k)) is not None}
        return replace(declared, **values, folder=declared.folder if own.requirements is None else own.folder)


SESSION_KEYS = ("slots", "lifetime", "line", "line_wait", "idle", "longest", "drain", "redirect")
"""Of a pool's settings, those that only sessions have."""
NODE_KEYS = {f.name: f for f in fields(Settings) if f.name not in ("pools", "envs", "tokens", "file")}
POOL_KEYS = {f.name: f for f in fields(PoolSettings)}
ENV_KEYS = {f.name: f for f in fields(EnvSettings) if f.name != "folder"}
TOKEN_KEYS = {f.name: f for f in fields(TokenSettings)}
_SHORTEST_SECRET = 16
PRIORITIES = range(-100, 101)  # of sessions


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
    _from_toml(values, pools, file or _named(environ), required=file is not None or bool(environ.get("OSTLER_CONFIG")))
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


def _named(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("OSTLER_CONFIG") or "ostler.toml")


def _from_toml(values: dict[str, Any], pools: dict[str, dict[str, Any]], path: Path, *, required: bool) -> None:
    if not path.exists():
        if required:
            raise ConfigError(f"the configuration file {path} does not exist")
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
        raise ConfigError(f"{source}: a token's name has letters, digits, '_' and '-', at most 63, found {name!r}")
    if not isinstance(table, Mapping):
        raise ConfigError(f'{source} must be a table, such as [tokens.{name}] secret = "…", pools = ["chromium"]')
    if strange := next((key for key in table if key not in TOKEN_KEYS), None):
        raise ConfigError(f"{source}: {strange!r} is not a key of a token; known are {', '.join(TOKEN_KEYS)}")
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
            f"{source}: {name!r} is not usable as a name of an environment: letters, digits, '_' and '-', at most 63, please"
        )
    if not isinstance(table, Mapping):
        raise ConfigError(f'{source} must be a table, such as [env.{name}] requirements = ["numpy==2.3.1"]')
    values = {key: _of_env(key, value, source) for key, value in table.items() if value is not None}
    if "path" in values and len(values) > 1:
        other = min(values.keys() - {"path"})
        raise ConfigError(f"{source}: path names an environment of your own, so {other} cannot be given with it")
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
        hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(ENV_KEYS)}"
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
    return [f"environment variable {name} is no setting of Ostler; docs/settings.md lists them" for name in found]


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
        if not equals or not size.strip().isdigit() or not is_pool_name(name.strip()):
            raise ConfigError(f"{source}: {pair!r} is not a pool size; write name=number, such as tag=2")
        sizes[name.strip()] = int(size)
    return sizes


def _typed(known: Mapping[str, Any], key: str, value: Any, source: str) -> Any:
    if key not in known:
        close = _close_matches(key, [*known, "pools", "env"], 0.6)
        hint = f"; did you mean {close[0]!r}?" if close else "; docs/settings.md lists the known ones"
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
            f"max_payload must be at most 16777216 (16 MiB), found {settings.max_payload}; pass larger things by path or key"
        )
    if settings.log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(f"log_level must be debug, info, warning or error, found {settings.log_level!r}")
    if not is_loopback(settings.host) and not settings.token:
        raise ConfigError(
            f"host {settings.host} can be reached from other machines, so a token is needed: set OSTLER_TOKEN, or listen on 127.0.0.1"
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
        (ttl, "registry_command_ttl", "a command could expire before a worker that was away for a moment sees it"),
        (ttl, "registry_sweep", "the sweep would look for dead workers before any can be"),
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
