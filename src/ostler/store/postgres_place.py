"""Where a PostgreSQL server is, how it is reached, and what its errors mean to the store."""

from __future__ import annotations

import select
from typing import Any
from urllib.parse import urlsplit

from ostler import extras
from ostler.errors import BadArguments, ConfigError, NoAccess, StoreBusy, StoreDoubt
from ostler.store.database import address_of

try:
    import psycopg

    from ostler.store.postgres_words import Whole, rows
except ImportError as missing:
    raise ConfigError(f"a PostgreSQL store needs a driver: {extras.command('postgres')}") from missing

Error = psycopg.Error
Outdated = psycopg.errors.FeatureNotSupported  # "cached plan must not change result type"

# A later try may work: the server is away, full, restarting or read-only, or others were in the way.
_PASSING = ("08", "53", "57P", "40", "55P03", "57014", "25P03", "25006", "58")
# What the driver says when no later try will work; such an error has no code.
_WRONG = (
    "password", "does not exist", "pg_hba.conf", "permission denied", "not permitted", "bad: invalid", "SSL", "certificate",
    "startup parameter",
)  # fmt: skip


class Place:
    """What a URL says: the server for the driver, and what is ours (`schema`, `pooler`)."""

    def __init__(self, url: str) -> None:
        known = address_of(url)
        self.address, self.shown, self.schema, self.pooler = known[:4]
        self.channel = f"ostler_{self.schema}"
        self.ended_channel = f"{self.channel}_ended"

    def without_password(self, text: str) -> str:
        """The driver quotes a URL that it cannot read."""
        secret = urlsplit(self.address).password
        return text.replace(secret, "…") if secret else text

    def connect(self, **how: Any) -> psycopg.Connection[Any]:
        """A connection that notices within seconds when the server is gone. Errors are the driver's."""
        found = psycopg.connect(
            self.address,
            autocommit=True,
            prepare_threshold=None if self.pooler else 2,
            connect_timeout=5,
            keepalives_idle=5,
            keepalives_interval=2,
            keepalives_count=3,
            tcp_user_timeout=15_000,
            row_factory=rows,
            client_encoding="utf8",
            **how,
        )
        found.adapters.register_dumper(int, Whole)
        return found

    # ---- errors

    def refused(self, error: psycopg.Error, *, first: bool) -> Exception:
        """Why there is no connection. What a first one shows to be wrong is a ConfigError; one that worked before may work again, and
        nothing is given up for that.
        """
        where, said = self.shown, self.without_password(line(error))
        wrong = isinstance(error, psycopg.ProgrammingError) or any(words in said for words in _WRONG)
        if wrong and first:
            pooler = "startup parameter" in said and not self.pooler
            hint = "for PgBouncer in transaction mode, add ?pooler=1 to the URL" if pooler else "check the URL"
            return ConfigError(f"the store {where} cannot be opened: {said}; {hint} in OSTLER_STORE")
        return StoreBusy(f"the store {where} cannot be used right now ({said}); nothing was stored, try again")

    def as_ours(self, error: psycopg.Error, *, works: bool) -> Exception:
        """What a statement's error means to who said it. `works`: the connection is still good."""
        where, said, code = self.shown, line(error), error.sqlstate or ""
        if code == "42501":
            return NoAccess(
                f"{where}: {said}. A role that may create the schema runs 'ostler migrate' once, or give this one the right: "
                f"GRANT CREATE ON DATABASE …, or USAGE and all rights on schema {self.schema}"
            )
        if code in ("42P01", "3F000", "42703", "42883"):
            return ConfigError(
                f"schema {self.schema} of {where} lacks something that this ostler needs ({said}); run 'ostler migrate'"
            )
        if code.startswith("22") or isinstance(error, psycopg.DataError):
            return BadArguments(f"a value cannot be stored or looked for: {said}")
        if not code and works:
            return error
        if not code or code.startswith(_PASSING) or isinstance(error, Outdated):
            return StoreBusy(f"the store {where} cannot be used right now ({said}); nothing was stored, try again")
        return error

    def doubt(self, error: BaseException) -> StoreDoubt:
        """The connection was lost while a commit was under way."""
        said = line(error) if isinstance(error, psycopg.Error) else str(error)
        return StoreDoubt(
            f"the connection to {self.shown} was lost during a commit ({said}): what it had may be stored "
            "or not. Look before you try again"
        )


def hung_up(connection: psycopg.Connection[Any]) -> bool:
    """Whether the server has something to say on a connection where nothing was asked: that it is gone."""
    if not works(connection):
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def works(connection: psycopg.Connection[Any] | None) -> bool:
    """Whether there is a connection and nothing is known against it."""
    return connection is not None and not connection.closed and not connection.broken


def line(error: psycopg.Error) -> str:
    """What the server said, on one line."""
    return " ".join((error.diag.message_primary or str(error)).split()) or type(error).__name__
