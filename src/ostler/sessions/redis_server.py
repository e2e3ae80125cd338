"""The server under a Redis registry: reaching it, its scripts, and patience while it is away."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ostler import extras
from ostler.errors import ConfigError, RegistryAway

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("ostler.sessions")

SCRIPTS = ("turn", "restore", "beat", "leave", "list", "live", "sweep", "end", "want")
AGAIN = 0.05  # seconds between two tries within a patience


class RedisServer:
    """One Redis or Valkey server. Needs the package redis, else raises ConfigError. Each `ask` is harmless when it is repeated."""

    def __init__(self, url: str, patience: float) -> None:
        self.name, self.patience = shown(url), patience
        self.redis = client(url, patience)
        self.trouble_at: float | None = None
        """When (monotonic) it last did not answer."""
        self._is_away = False
        self._scripts = {name: self.redis.register_script(_script(name)) for name in SCRIPTS}

    async def reach(self, attempts: int, delay: float) -> None:
        """Try so often; raises ConfigError when it never answers."""
        said = ""
        for attempt in range(1, attempts + 1):
            try:
                async with asyncio.timeout(self.patience):
                    await self.redis.ping()
            except errors() as error:
                said = _words(error)
                log.warning("the registry %s does not answer (attempt %d): %s", self.name, attempt, said)
                if attempt < attempts:
                    await asyncio.sleep(delay)
            else:
                return
        await self.redis.aclose()
        raise ConfigError(
            f"the registry {self.name} could not be reached in {attempts} attempts ({said}); "
            "start the server, or correct `registry`"
        )

    async def ask(self, script: str, **given: Any) -> Any:
        """Run a script; raises RegistryAway."""
        text = json.dumps(given)
        return await self.insist(lambda: self._scripts[script](args=[text]))

    async def insist(self, ask: Callable[[], Awaitable[Any]]) -> Any:
        """Ask until there is an answer, for as long as patience lasts: a server that restarts is back in a moment."""
        until = time.monotonic() + self.patience
        while True:
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    answer = await ask()
            except errors() as error:
                self.is_away(error)
                if not _passes(error) or time.monotonic() + AGAIN >= until:
                    raise RegistryAway(
                        f"the registry {self.name} does not answer ({_words(error)}); "
                        "sessions that are open go on, new ones have to wait"
                    ) from error
                await asyncio.sleep(AGAIN)
            else:
                if self._is_away:
                    log.info("the registry %s answers again", self.name)
                    self._is_away = False
                return answer

    def is_away(self, error: BaseException) -> None:
        """It did not answer; logged once until it does."""
        self.trouble_at = time.monotonic()
        if not self._is_away:
            log.warning("the registry %s does not answer: %s", self.name, _words(error))
            self._is_away = True

    async def close(self) -> None:
        await self.redis.aclose()


def shown(url: str) -> str:
    """The registry's URL without its password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@cache
def _script(name: str) -> str:
    folder = files("ostler.sessions") / "lua"
    return "\n".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in ("common", name))


def client(url: str, patience: float) -> Redis:
    try:
        from redis.asyncio import Redis  # noqa: PLC0415  an extra
        from redis.asyncio.retry import Retry  # noqa: PLC0415
        from redis.backoff import NoBackoff  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"registry = {shown(url)!r} needs the package redis: {extras.command('redis')}") from error
    known = url.replace("valkey", "redis", 1) if url.startswith("valkey") else url
    try:
        # Each command is harmless when it is repeated, so one that finds its connection dead is sent again on another.
        return Redis.from_url(
            known,
            decode_responses=True,
            socket_timeout=None,  # our own timeouts are enough; with this one the client swallows cancellations on Python 3.11
            socket_connect_timeout=patience,
            retry=Retry(NoBackoff(), 1),
        )
    except ValueError as error:
        raise ConfigError(
            f"registry {shown(url)!r} cannot be used: {error}. Leave it out for the store, or write redis://host:6379/0"
        ) from error


@cache
def errors() -> tuple[type[BaseException], ...]:
    from redis.exceptions import RedisError  # noqa: PLC0415  an extra

    return (RedisError, OSError, TimeoutError)


def _passes(error: BaseException) -> bool:
    """Whether a later try may work: the server is away, loads its data, or has just become a replica."""
    from redis.exceptions import AuthenticationError, ReadOnlyError, ResponseError  # noqa: PLC0415  an extra

    if isinstance(error, AuthenticationError):
        return False
    return not isinstance(error, ResponseError) or isinstance(error, ReadOnlyError)


def _words(error: BaseException) -> str:
    return str(error) or "no answer in time"
