"""``proofserve doctor``: whether this host can serve, prove and verify, and what is missing."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.text import Text

from proofserve.cli.options import Json
from proofserve.cli.session import EXIT_ERROR, EXIT_FAILED
from proofserve.lab.host import host_facts
from proofserve.lab.report import write_json
from proofserve.settings.node import NodeSettings
from proofserve.wire.records import first_problem

if TYPE_CHECKING:
    from proofserve.wiring.start_checks import HostLine

app = typer.Typer()
COLUMN = 11


@app.command("doctor")
def command(json: Json = None) -> None:
    """Say in ten lines whether this host can serve, prove and verify.

    It looks at packages, torch, cards, memory, vLLM, its plugins, the outbox
    and the keys, as the variables POC_... say. It starts nothing and changes
    nothing. Exit code 0: all three. 1: not all. 2: a variable is not valid.

    \b
    proofserve doctor
    POC_OUTBOX=/data/outbox.sqlite proofserve doctor --json doctor.json
    """
    # It imports what a node needs, and takes seconds; --help must not wait for it.
    from proofserve.wiring.start_checks import host_lines, required, verdict  # noqa: PLC0415

    console = Console()
    try:
        chosen = NodeSettings()
    except ValidationError as error:
        field, message = first_problem(error)
        console.print(f"POC_{field.partition('.')[0].upper()}: {message}", markup=False)
        raise typer.Exit(EXIT_ERROR) from error
    with console.status("looking at this host ..."):
        facts = host_facts(required())
        found = host_lines(chosen, facts)
    able = verdict(found)
    for each in found:
        console.print(_line(each), soft_wrap=True)
    console.print(_last_line(able), soft_wrap=True)
    if json is not None:
        lines = [{**asdict(each), "lacking": sorted(each.lacking)} for each in found]
        write_json(json, {"can": able, "findings": lines, "facts": asdict(facts)})
    raise typer.Exit(0 if all(able.values()) else EXIT_FAILED)


def _line(found: "HostLine") -> Text:
    line = Text(f"{found.name:{COLUMN}}")
    line.append(found.text, style="red" if found.lacking else "")
    if found.remedy is not None:
        line.append(f" -> {found.remedy}", style="yellow")
    return line


def _last_line(able: dict[str, bool]) -> Text:
    line = Text(f"{'this host':{COLUMN}}")
    for number, (task, can) in enumerate(able.items()):
        line.append(", " if number else "")
        words = f"can {task}" if can else f"cannot {task}"
        line.append(words, style="bold green" if can else "bold red")
    return line
