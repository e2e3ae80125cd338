"""Names that users give. Apart from the settings: a worker that only declares an app has no use for those, and starts without them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from ostler.errors import ConfigError

_POOL_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}", re.IGNORECASE)


def is_pool_name(name: str) -> bool:
    """Whether it can be part of a component id and a file name."""
    return isinstance(name, str) and _POOL_NAME.fullmatch(name) is not None


def pool_name(name: str) -> str:
    """The name, when it is one for a pool; raises ConfigError."""
    if not is_pool_name(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a queue or pool; use letters, digits, '_', '.' and '-', at most 63"
        )
    return name


def no_task(task: str, known: Iterable[str], *, where: str = "") -> str:
    """What is said of a task that no running node declares, and what to do."""
    import difflib  # noqa: PLC0415  for those who mistype

    names = sorted(known)
    close = difflib.get_close_matches(task[:80], names, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"declared are: {', '.join(names) or 'none'}."
    return (
        f"there is no task {task[:80]!r}{where}; {hint} A node knows the tasks of the code that it was started with: if this one is new, restart "
        "the node (or run it with 'ostler up --reload')"
    )


# What browsers show and Python's own table lacks, or has differently on some systems.
_KINDS = {
    ".aac": "audio/aac",
    ".avif": "image/avif",
    ".flac": "audio/flac",
    ".jsonl": "text/plain",
    ".log": "text/plain",
    ".m4a": "audio/mp4",
    ".m4v": "video/mp4",
    ".md": "text/markdown",
    ".mkv": "video/x-matroska",
    ".oga": "audio/ogg",
    ".ogg": "audio/ogg",
    ".opus": "audio/ogg",
    ".srt": "text/plain",
    ".toml": "text/plain",
    ".wav": "audio/wav",
    ".weba": "audio/webm",
    ".webp": "image/webp",
    ".yaml": "text/plain",
    ".yml": "text/plain",
}


@cache
def _known() -> Any:
    import mimetypes  # noqa: PLC0415  who publishes nothing does not load it

    return mimetypes.MimeTypes()  # Python's own table; that of the system may say anything


def media_type(name: str) -> str:
    """The media type that a file's name tells: the same on every machine. Without a known ending, application/octet-stream."""
    ending = name[name.rfind(".") :].lower() if "." in name else ""
    if ending in _KINDS:
        return _KINDS[ending]
    kind, encoding = _known().guess_type(f"x{ending}")
    return "application/octet-stream" if encoding or not kind else str(kind)
