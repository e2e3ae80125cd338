"""How a program that knows nothing of Ostler shows that it is ready, and that it still is.

None                              alive is ready
"tcp://127.0.0.1:{port}"          something accepts a connection (with `socket`: there)
"http://127.0.0.1:{port}/health"  answers with 2xx or 3xx
"line:Listening on"               its output has a line that matches; from then on, alive is healthy
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ostler.errors import ConfigError

_PATIENCE = 5.0
_PLACE = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True, slots=True)
class Probe:
    """A parsed probe. `kind` is none, tcp, http or line."""

    kind: str
    target: str = ""
    socket: str = ""  # the path of a Unix socket, where it listens on one

    @property
    def repeats(self) -> bool:
        """Whether it can be asked again and again, and so tell about health."""
        return self.kind in ("tcp", "http")

    def fill(self, places: Mapping[str, str]) -> Probe:
        """With `{port}` and the like put in."""
        return Probe(self.kind, fill(self.target, places), fill(self.socket, places))


def fill(text: str, places: Mapping[str, str]) -> str:
    """`{name}` becomes its value; what is put in is not looked at again."""
    return _PLACE.sub(lambda found: places.get(found[1], found[0]), text)


def parse(text: str | None) -> Probe:
    """The probe that the text names; raises ConfigError."""
    if text is None:
        return Probe("none")
    kind, _, rest = text.partition(":")
    if kind == "line" and rest:
        try:
            re.compile(rest)
        except re.error as error:
            raise ConfigError(f"ready={text!r}: not a regular expression ({error})") from error
        return Probe("line", rest)
    if kind in ("tcp", "http") and rest.startswith("//"):
        probe = Probe(kind, text)
        parts = urlsplit(probe.fill({"port": "1", "n": "0"}).target)
        with contextlib.suppress(ValueError):
            if parts.hostname and (parts.port or kind == "http"):
                return probe
    raise ConfigError(f"ready={text!r} is not a probe: use tcp://host:port, http://host:port/path, line:REGEX or None")


async def ask(probe: Probe) -> str | None:
    """Ask once: None when all is well, else what was wrong, in words."""
    parts = urlsplit(probe.target)
    host, port = parts.hostname or "127.0.0.1", parts.port or 80
    try:
        async with asyncio.timeout(_PATIENCE):
            if probe.socket:
                reader, writer = await asyncio.open_unix_connection(probe.socket)
            else:
                reader, writer = await asyncio.open_connection(host, port)
            try:
                if probe.kind == "tcp":
                    return None
                path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
                writer.write(
                    f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\nUser-Agent: ostler\r\n\r\n".encode()
                )
                status = (await reader.readline()).split()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except TimeoutError:
        return f"{probe.target} did not answer within {_PATIENCE:g} s"
    except (OSError, ValueError) as error:
        return f"{probe.target}: {getattr(error, 'strerror', None) or error}"
    if len(status) < 2 or not status[1].isdigit():
        return f"{probe.target} did not answer with HTTP"
    return None if 200 <= int(status[1]) < 400 else f"{probe.target} answered {status[1].decode()}"
