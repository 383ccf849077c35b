"""What every command that measures or checks works with: a console, signals, readable errors."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console

from proofserve.cli.interrupts import Interrupts
from proofserve.cli.progress import ProgressLine
from proofserve.engines.reference.errors import CheckpointError
from proofserve.lab.client.errors import LabError
from proofserve.rounds.errors import RoundsError
from proofserve.wiring.launch import ServerFailed

# Exit codes: a promise was broken, or it could not be found out.
BROKEN = 1
UNKNOWN = 2

Url = Annotated[str | None, typer.Option(help="A server that runs already, instead of our own.")]
Name = Annotated[
    str | None, typer.Option("--model", help="With --url: the model's name, if not its first.")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="POC_API_KEY",
        # A server's variable may list several keys.
        callback=lambda keys: keys and keys.partition(",")[0],
        help="A key of the node that runs already, if it asks for one.",
    ),
]
SeqLen = Annotated[int, typer.Option(help="Tokens per nonce.", min=1)]


@dataclass(frozen=True, slots=True)
class CommandSession:
    """Where results go, what may interrupt us, and the line that says what we are at."""

    console: Console
    interrupts: Interrupts
    line: ProgressLine


@contextmanager
def open_desk() -> Iterator[CommandSession]:
    """A desk for one command. Errors that a person can act on become their text and exit code 2."""
    console = Console()
    try:
        with Interrupts() as interrupts, ProgressLine(console) as line:
            yield CommandSession(console, interrupts, line)
    except (LabError, ServerFailed, CheckpointError, RoundsError, ValueError, OSError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        raise typer.Exit(UNKNOWN) from error
