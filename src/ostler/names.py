"""Names that users give. Apart from the settings: a worker that only declares an app has no use for those, and starts without them."""

from __future__ import annotations

import re

from ostler.errors import ConfigError

_POOL_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}", re.IGNORECASE)


def is_pool_name(name: str) -> bool:
    """Whether it can be part of a component id and a file name."""
    return isinstance(name, str) and _POOL_NAME.fullmatch(name) is not None


def pool_name(name: str) -> str:
    """The name, when it is one for a pool; raises ConfigError."""
    if not is_pool_name(name):
        raise ConfigError(
            f"{name!r} is not usable as a name of a queue or pool: letters, digits, '_', '.' and '-', at most 63, please"
        )
    return name
