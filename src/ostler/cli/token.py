"""`ostler token`: the way in for a browser or program of another user."""

from __future__ import annotations

from urllib.parse import quote

import click

from ostler import private
from ostler.calls.address import has_own_token, node_url
from ostler.cli.options import where
from ostler.config import Settings
from ostler.errors import ConfigError


@click.command()
@where
def token(known: Settings) -> None:
    """Print the node's token, and a link that logs a browser in."""
    url = node_url(known)
    if url and not known.token and not has_own_token(known):
        raise ConfigError(
            f"the node at {url} was started with a configured token (OSTLER_TOKEN or ostler.toml), which is not stored: "
            "set OSTLER_TOKEN here as well"
        )
    found = known.token or private.read_token(known.data_dir)
    if not found:
        private.check(known.data_dir / private.TOKEN, write=False)
        raise ConfigError(
            f"there is no token in {known.data_dir}; a node creates one when it first starts ('ostler up')"
        )
    print(found)
    if url is None:
        print("no node is running; the token stays the same when it starts")
    else:
        print(f"{url}/?token={quote(found, safe='')}")
