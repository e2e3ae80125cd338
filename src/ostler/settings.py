"""All settings as plain data, each with a description; docs/settings.md is generated from it. config.py reads and checks them.

Standard library alone.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any


def _setting(default: Any, doc: str) -> Any:
    return field(default=default, metadata={"doc": doc})


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """Settings of one pool; None: the node's setting applies. TOML: a table `[pools.<name>]`."""

    workers: int | None = _setting(None, "number of workers")
    startup_deadline: float | None = _setting(None, "seconds from spawn to ready")
    stale_after: float | None = _setting(None, "seconds without a heartbeat after which a worker counts as hung")
    stop_grace: float | None = _setting(None, "seconds that running work gets to finish when the worker is stopped")
    recycle_count: int | None = _setting(None, "replace a worker after this many jobs or calls")
    recycle_age: float | None = _setting(None, "replace a worker after this many seconds")
    recycle_rss_mb: float | None = _setting(None, "replace a worker that uses more than this many MB of memory")
    recycle_warm: bool | None = _setting(None, "start the replacement before the old worker leaves")
    high_watermark: int | None = _setting(
        None, "backpressure: hold the queue while more than this many jobs are ready; 0: off"
    )
    env: str | None = _setting(None, "the environment that the queue's workers run in; default: the node's own")
    slots: int | None = _setting(None, "sessions: how many one worker serves at once")
    lifetime: int | None = _setting(None, "sessions: replace a worker after this many sessions; 0: never")
    line: int | None = _setting(None, "sessions: how many clients may wait for a slot; more are refused")
    line_wait: float | None = _setting(None, "sessions: how long a client may wait for a slot, in seconds")
    idle: float | None = _setting(None, "sessions: end a session after this many seconds without traffic; 0: never")
    longest: float | None = _setting(None, "sessions: end a session after this many seconds; 0: never")
    drain: float | None = _setting(None, "sessions: seconds that sessions get to end when their worker leaves")
    redirect: bool | None = _setting(
        None, "sessions: send clients directly to the worker instead of relaying their traffic"
    )


@dataclass(frozen=True, slots=True)
class EnvSettings:
    """The description of a virtual environment; None: not given. TOML: a table `[env.<name>]`. Paths are absolute."""

    python: str | None = _setting(
        None, "a version such as 3.12, or the path of an interpreter; default: the node's own Python"
    )
    requirements: str | tuple[str, ...] | None = _setting(
        None, "a requirements or lock file, or a list of requirement lines"
    )
    constraints: str | None = _setting(
        None, "a constraints file that pins the versions of everything that is installed"
    )
    no_deps: tuple[str, ...] | None = _setting(None, "packages to install last, without their declared dependencies")
    index: str | None = _setting(None, "the package index to use instead of PyPI")
    extra_index: tuple[str, ...] | None = _setting(None, "one or more additional package indexes")
    installer: str | None = _setting(None, "uv or pip; default: uv if it is found, else pip")
    path: str | None = _setting(
        None, "an existing environment, which Ostler uses but neither builds nor removes; excludes all other keys"
    )
    folder: str = ""  # where relative paths in requirement lines begin

    @property
    def given(self) -> bool:
        return any(getattr(self, key) is not None for key in ENV_KEYS)


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """A token that can open sessions of some pools, and nothing else. TOML: a table `[tokens.<name>]`."""

    secret: str = _setting("", "what clients send as a bearer token or as `?token=`; at least 16 characters")
    pools: tuple[str, ...] = _setting((), "the pools whose sessions it may open; empty: all")
    sessions: int = _setting(
        0, "how many sessions it may have at once on one node, including waiting ones; 0: no limit"
    )
    priority: int = _setting(0, "the highest priority that its sessions may ask for, -100 to 100")


@dataclass(frozen=True, slots=True)
class Settings:
    """One node's settings. Durations are seconds."""

    name: str = _setting("", "the node's name; empty: the host name")
    store: str = _setting(
        "",
        "where jobs and records are stored: empty for SQLite in the data directory, sqlite:///path, or postgresql://user@host/database",
    )
    data: str = _setting(".ostler", "the data directory: database, logs, artifacts, sockets")
    host: str = _setting("127.0.0.1", "the address to listen on; anything but loopback requires a token")
    port: int = _setting(8356, "the port to listen on; 0: any free port")
    token: str = _setting(
        "",
        "the bearer token that every request must send; empty: the node creates one (`ostler token` prints it), and its own user and root do not need it on loopback",
    )
    group: str = _setting(
        "",
        "a group whose members may use the data directory, for example to enqueue from a web app; empty: only the node's user",
    )
    public: str = _setting(
        "",
        "host names under which a reverse proxy serves the node, comma-separated (jobs.example.org); everybody then needs the token",
    )
    advertise: str = _setting(
        "",
        "the URL at which other nodes reach this one (http://10.0.0.7:8356); empty: from host and port, none on loopback",
    )
    url: str = _setting(
        "",
        "the node that `app.call` and `ostler call` use, with `token`; empty: the node of the data directory",
    )
    log_level: str = _setting("info", "debug, info, warning or error")
    log_format: str = _setting("text", "text, or json for one JSON object per line")

    workers: int = _setting(2, "workers of each pool that does not set its own number")
    heartbeat_interval: float = _setting(5.0, "seconds between a worker's heartbeats")
    stale_after: float = _setting(
        30.0, "seconds without a heartbeat after which a worker counts as hung and is killed; at least 3 heartbeats"
    )
    node_lease: float = _setting(
        30.0,
        "seconds without a heartbeat after which other nodes declare a node dead and requeue its jobs; at least 3 heartbeats",
    )
    startup_deadline: float = _setting(
        60.0, "seconds that a worker has to become ready; then it is killed, which counts as a crash"
    )
    stop_grace: float = _setting(
        10.0, "seconds that running work gets to finish when a worker or the node is stopped, before SIGTERM"
    )
    term_grace: float = _setting(2.0, "seconds from SIGTERM to SIGKILL")
    healthy_after: float = _setting(300.0, "healthy seconds after which the crash streak resets")
    restart_limit: int = _setting(5, "crashes within restart_window that mark a worker failed")
    restart_window: float = _setting(300.0, "the sliding window of restart_limit, in seconds")
    restart_lifetime: int = _setting(20, "crashes in total that mark a worker failed")
    backoff_max: float = _setting(60.0, "the longest delay before a restart, in seconds; delays double from 1 s")
    recycle_count: int = _setting(0, "replace each worker after this many jobs or calls; 0: never")
    recycle_age: float = _setting(0.0, "replace each worker after this many seconds; 0: never")
    recycle_rss_mb: float = _setting(0.0, "replace each worker that uses more than this many MB of memory; 0: never")
    recycle_warm: bool = _setting(False, "start the replacement before the old worker leaves")

    memory_headroom_mb: float = _setting(
        512.0, "host memory that is never reserved for workers, in MB; it is left to the node and other programs"
    )
    gpu_headroom_mb: float = _setting(512.0, "memory of each GPU that is never reserved for workers, in MB")
    memory_patience: float = _setting(
        30.0, "seconds after which a worker that waits for memory is no longer overtaken by others"
    )
    gpu_exclusive: bool = _setting(
        False, "let only one model at a time load or answer on the GPUs, even if several would fit"
    )

    parked_for: float = _setting(
        3600.0, "seconds after which a parked model (its GPU memory moved to the host) that is not called is stopped"
    )

    poll_interval: float = _setting(
        1.0, "seconds between polls of the store; only a fallback, since enqueueing wakes the node"
    )
    cancel_grace: float = _setting(10.0, "seconds that a running job gets to react to a cancel, before SIGTERM")
    retry_base: float = _setting(
        1.0, "delay before the first retry of a failed job, in seconds; it doubles with each further retry"
    )
    retry_max: float = _setting(300.0, "the longest delay before a retry, in seconds")
    crash_limit: int = _setting(
        2, "how often a job that crashed its worker is run again; one more crash makes it TOXIC"
    )
    crash_delay: float = _setting(
        10.0,
        "delay before a job that crashed twice runs again, in seconds; after the first crash it runs again at once",
    )
    job_nice: int = _setting(
        5,
        "added to the niceness of job workers if the app has models, so that calls get the CPU first; 0: no difference",
    )
    max_payload: int = _setting(1_048_576, "the maximum size of a job's arguments or result as JSON, in bytes")
    max_body: int = _setting(67_108_864, "the maximum size of a call's body, in bytes")
    store_patience: float = _setting(30.0, "seconds that an enqueue waits for a locked or full store before it fails")
    results: str = _setting(
        "", "where jobs publish artifacts: empty for `results` in the data directory, a path, or an fsspec URL"
    )
    env_dir: str = _setting("", "where environments are built: empty for `envs` in the data directory, or a path")
    scratch_max_age: float = _setting(
        604_800.0, "seconds after which the scratch directories of failed runs are deleted"
    )
    scratch_max_mb: float = _setting(
        10_000.0, "total size of scratch directories of ended jobs, in MB; the oldest are deleted first"
    )
    high_watermark: int = _setting(
        0,
        "backpressure: hold a queue while more than this many of its jobs are ready and other programs need the CPU; 0: off",
    )
    load_threshold: float = _setting(
        0.7, "backpressure: the share of the CPU used by other programs (0 to 1, over 5 s) above which a queue is held"
    )
    backpressure_pause: float = _setting(3.0, "backpressure: how long a queue is held, in seconds")
    retry_jitter: float = _setting(0.1, "random variation of each retry delay, as a share of it")
    retention: float = _setting(
        604_800.0,
        "seconds after which done and cancelled jobs are deleted, with their timeline, logs and artifacts; 0: never",
    )
    failed_retention: float = _setting(2_592_000.0, "seconds after which failed jobs are deleted; 0: never")
    calls_retention: float = _setting(604_800.0, "seconds after which entries of the call log are deleted; 0: never")
    calls_kept: int = _setting(
        100_000, "the maximum number of entries in the call log; the newest are kept; 0: no limit"
    )
    sessions_retention: float = _setting(
        2_592_000.0, "seconds after which records of ended sessions are deleted; 0: never"
    )
    sessions_kept: int = _setting(
        100_000, "the maximum number of records of ended sessions; the newest are kept; 0: no limit"
    )
    registry: str = _setting(
        "",
        "where slots of sessions are assigned: empty for the store, or redis://host:6379/0 (also rediss://, unix://, valkey://) for Redis or Valkey",
    )
    registry_key_ttl: float = _setting(
        30.0,
        "Redis: seconds without a heartbeat after which a worker is gone; more than heartbeat_interval, less than the next two",
    )
    registry_command_ttl: float = _setting(
        60.0,
        "Redis: lifetime of a command (`worker:cmd:…`), in seconds; a node that has seen it carries it out in any case",
    )
    registry_sweep: float = _setting(300.0, "Redis: seconds between a node's searches for workers that are gone")
    registry_attempts: int = _setting(5, "Redis: how often a starting node tries to reach the server")
    registry_delay: float = _setting(3.0, "Redis: seconds between these attempts")
    upkeep_interval: float = _setting(
        60.0, "seconds between a node's checks for dead nodes, and for old jobs, logs and scratch directories"
    )
    exit_retention: float = _setting(2_592_000.0, "seconds for which workers' exit records and incidents are kept")
    event_keepalive: float = _setting(
        15.0, "seconds after which a quiet event stream sends a comment, so that proxies keep it open"
    )
    max_streams: int = _setting(2000, "the maximum number of open event and log streams; more are refused with 503")

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
PRIORITIES = range(-100, 101)  # of sessions
