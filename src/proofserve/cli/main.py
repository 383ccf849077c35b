"""``proofserve``: the table of commands. Only the module of the called command is imported."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from proofserve.settings.process import export, has_variable

# The module of each command, and its attribute that is the command or a group of commands.
# Importing torch costs seconds and a quarter of a gigabyte, and a gateway does not need it.
COMMANDS = {
    "serve": ("serve", "app"),
    "gateway": ("serve", "gateway_app"),
    "fleet": ("fleet", "app"),
    "demo": ("demo", "app"),
    "receive": ("receive", "app"),
    "outbox": ("outbox", "app"),
    "verify": ("validator.verify", "app"),
    "challenge": ("validator.challenge", "app"),
    "verify-chat": ("validator.chat", "verify_app"),
    "watch-chat": ("validator.chat", "watch_app"),
    "probe": ("validator.probe", "app"),
    "audit": ("validator.audit", "app"),
    "model": ("model", "app"),
    "check": ("check", "app"),
    "bench": ("bench", "app"),
    "calibrate": ("validator.calibrate", "app"),
    "doctor": ("doctor", "app"),
}

# torch reads it at its first tensor. A validator's large tensors come and go, and with pages of
# 4 KiB it would spend a quarter of its time on the first touch of each page (ADR 46).
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


class Commands(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - the group's signature
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module, attribute = COMMANDS[cmd_name]
        if module.startswith("validator.") and not has_variable(HUGE_PAGES):
            export({HUGE_PAGES: "1"})
        command = get_command(getattr(import_module(f"proofserve.cli.{module}"), attribute))
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=Commands,
    name="proofserve",
    help="Make an unmodified vLLM server prove its compute in the time that chat leaves free.",
    epilog="Start with `proofserve demo`. Every command has --help.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)


@app.callback()
def proofserve() -> None:
    """Makes this a group; without it typer would run a single command directly."""
