"""The `ostler` command. A file per group of commands; each is loaded only when it is used."""

from __future__ import annotations

import difflib
import importlib
import sys

import click

import ostler
from ostler.errors import OstlerError

# command -> the module of this package that has it
_COMMANDS = {
    "up": "node",
    "check": "node",
    "demo": "demo",
    "enqueue": "enqueue",
    "jobs": "jobs",
    "cancel": "jobs",
    "retry": "jobs",
    "artifacts": "artifacts",
    "call": "call",
    "calls": "calls",
    "sessions": "sessions",
    "nodes": "nodes",
    "health": "nodes",
    "workers": "workers",
    "pause": "workers",
    "resume": "workers",
    "drain": "workers",
    "restart": "workers",
    "reset": "workers",
    "kill": "workers",
    "logs": "logs",
    "events": "events",
    "top": "top",
    "schedules": "schedules",
    "env": "env",
    "music": "music",
    "token": "token",
    "doctor": "doctor",
    "migrate": "migrate",
}
# what other queues call it
_HABITS = {
    "worker": "`ostler up APP` to start a node with its workers, `ostler workers` to list them",
    **dict.fromkeys(
        ("beat", "scheduler"), "`ostler up APP` (the node runs schedules itself), `ostler schedules` to list them"
    ),
    **dict.fromkeys(("start", "run", "serve", "runserver", "dev"), "`ostler up APP`"),
    **dict.fromkeys(("flower", "dashboard", "monitor"), "`ostler top`, or the dashboard at the node's address"),
    **dict.fromkeys(("status", "inspect", "ping"), "`ostler health`, `ostler workers`"),
    **dict.fromkeys(("purge", "empty", "revoke"), "`ostler cancel --queue NAME`, `ostler cancel ID`"),
    **dict.fromkeys(("requeue", "redrive"), "`ostler retry ID`, `ostler retry --queue NAME`"),
}


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module = importlib.import_module(f"ostler.cli.{_COMMANDS[name]}")
        command: click.Command = getattr(module, name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            hint = _HABITS.get(args[0]) or ", ".join(difflib.get_close_matches(args[0], _COMMANDS, 2))
            raise click.UsageError(f"{error.message}{f' Try: {hint}' if hint else ''}", ctx) from None


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(ostler.__version__, prog_name="ostler")
def cli() -> None:
    """Run background jobs, ML models and live sessions in supervised worker processes."""


def main() -> None:
    """Run the command. Errors that a user can cause print one sentence and exit with code 2, never with a traceback."""
    try:
        cli(standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except OstlerError as error:
        print(f"ostler: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(0)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
