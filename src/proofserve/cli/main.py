"""``proofserve``: the table of commands. Only the module of the called command is imported."""

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from proofserve.settings.process import export, has_variable

# Where each command or group of commands is, a module and its attribute, and what the list of
# commands says. Those of proofserve_lab stand above the package, which never imports them.
# Importing torch costs seconds and a quarter of a gigabyte: no list and no gateway needs it.
COMMANDS = {
    "serve": ("proofserve.cli.serve:app", "Start vLLM's own server for MODEL."),
    "gateway": (
        "proofserve.cli.serve:gateway_app",
        "Relay chat to vLLM servers: a bounded queue, timeouts, streams, limits per key.",
    ),
    "fleet": (
        "proofserve.cli.fleet:app",
        "Many servers that look like one node: the controller, and its members.",
    ),
    "demo": (
        "proofserve_lab.demo:app",
        "Serve a model, chat, prove, and tell honest proofs and receipts from forged.",
    ),
    "receive": (
        "proofserve.cli.receive:app",
        "Receive callbacks (/generated, /validated, /logged), store them, and show a live summary.",
    ),
    "outbox": (
        "proofserve.cli.outbox:app",
        "Show, resend, export and delete a node's results; also while it runs.",
    ),
    "verify": (
        "proofserve.cli.validator.verify:app",
        "Recompute a sample of a node's artifacts, and reach a verdict: honest or fraud.",
    ),
    "challenge": (
        "proofserve.cli.validator.challenge:app",
        "Have a node compute nonces of a block that was drawn just now, and judge it.",
    ),
    "validate": (
        "proofserve.cli.validator.validate:app",
        "Challenge every node that is due, judge them, and keep a ledger.",
    ),
    "verify-bundle": (
        "proofserve.cli.validator.bundle:app",
        "Check a verdict of another validator, and compute it again.",
    ),
    "verify-chat": (
        "proofserve.cli.validator.chat:verify_app",
        "Check answers by their receipts, and reach a verdict: honest or fraud.",
    ),
    "watch-chat": (
        "proofserve.cli.validator.chat:watch_app",
        "Check a provider's answers by their receipts, again and again.",
    ),
    "probe": (
        "proofserve.cli.validator.probe:app",
        "Ask any OpenAI-compatible endpoint, and say whether it serves this checkpoint.",
    ),
    "audit": (
        "proofserve.cli.validator.audit:app",
        "Try every known attack on a deployment, and say which its validators would notice.",
    ),
    "model": ("proofserve.cli.model:app", "Make small checkpoints, which load like any other."),
    "check": (
        "proofserve_lab.check.command:app",
        "Check a server that this command starts, or a running one.",
    ),
    "bench": (
        "proofserve_lab.bench.command:app",
        "Measure a server that we start, or a running one.",
    ),
    "calibrate": (
        "proofserve.cli.validator.calibrate:app",
        "Find the parameters that suit a model.",
    ),
    "doctor": (
        "proofserve_lab.doctor:app",
        "Say in ten lines whether this host can serve, prove and verify.",
    ),
}

VERDICTS = "proofserve.cli.validator."
# The extras of packages that only some commands need.
EXTRAS = {
    **dict.fromkeys(("psutil", "vllm"), "[vllm]"),
    **dict.fromkeys(("matplotlib", "safetensors", "torch", "transformers"), "[reference]"),
    **dict.fromkeys(("aiohttp", "dbos", "psycopg", "sqlalchemy"), "[fleet]"),
    **dict.fromkeys(("gguf", "tokenizers"), "[models]"),
}

# torch reads it at its first tensor. A validator's large tensors come and go, and with pages of
# 4 KiB it would spend a quarter of its time on the first touch of each page (ADR 46).
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"


class Commands(TyperGroup):
    """Loads only the command that is called; a list shows the lines of the table."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = {
            name: TyperCommand(name, help=line) for name, (_, line) in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, listed, rest = super().resolve_command(ctx, args)
        if name is None or listed is None:
            return name, listed, rest
        ctx.invoked_subcommand = name
        module, _, attribute = COMMANDS[name][0].partition(":")
        if module.startswith(VERDICTS) and not has_variable(HUGE_PAGES):
            export({HUGE_PAGES: "1"})
        command = get_command(getattr(import_module(module), attribute))
        command.name = name
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        """Ends a command that lacks a package by saying what to install.

        Its exit code is 2, of a command with a verdict 3, as 1 and 2 would be verdicts.
        """
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            extra = EXTRAS.get((error.name or "").partition(".")[0], "")
            typer.secho(f"{error}: pip install 'proofserve{extra}'", fg="red", err=True)
            verdicts = COMMANDS[ctx.invoked_subcommand][0].startswith(VERDICTS)
            raise typer.Exit(3 if verdicts else 2) from error


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
