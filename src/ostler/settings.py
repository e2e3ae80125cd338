"""What can be set, as plain data with a sentence for each: docs/settings.md is made from it. config.py reads and checks it.

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
    log_format: str = _setting("text", "text, or json: one object per line, for programs that gather logs")

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
PRIORITIES = range(-100, 101)  # of sessions
