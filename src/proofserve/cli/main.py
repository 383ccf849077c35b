"""``proofserve``: the table of its commands. One that is not called is not imported."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

# Each module's ``app`` is a command or a group of them. Torch alone costs seconds and a quarter of
# a gigabyte, which a gateway in front of other machines can do without.
COMMANDS = {
    name: f"proofserve.cli.{name}"
    for name in (
        *("serve", "gateway", "demo", "receive", "outbox", "verify", "audit"),
        *("model", "check", "bench", "calibrate"),
    )
}


class Commands(TyperGroup):
    """Imports a command when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the group's signature
        """Their names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """The command of a name, None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        command = get_command(import_module(COMMANDS[cmd_name]).app)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=Commands,
    name="proofserve",
    help="Make an unmodified vLLM server prove its compute in the time that chat leaves free.",
    epilog="Start with `proofserve demo`. Every command explains itself with --help.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def proofserve() -> None:
    """A group, whatever is registered."""
