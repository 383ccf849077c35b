"""The command line: ``python -m families``."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from families.candidates import CANDIDATES, FOLDER, ROOT
from families.page import page, wrong
from families.results import Row
from families.trial import tried
from proofserve.cli.session import EXIT_FAILED, open_session
from proofserve.host import machine

PAGE = ROOT / "docs" / "models.md"
MEASURED = Path(__file__).parent / "measured"

app = typer.Typer(help="Every family of models and every format, live on this machine's CPU.")


@app.command()
def run(
    only: Annotated[
        list[str] | None, typer.Option(help="A family or a format; repeat it for several.")
    ] = None,
) -> None:
    """Try the families and formats, and write docs/models.md. Exit code 1 if one of them failed.

    \b
    Those that do not run now keep their results, which are files in families/measured.
    """
    if unknown := set(only or ()) - set(CANDIDATES):
        raise typer.BadParameter(f"{', '.join(unknown)}; there are {', '.join(CANDIDATES)}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    MEASURED.mkdir(exist_ok=True)
    for name in only or CANDIDATES:
        typer.echo(f"{name} ...")
        with (FOLDER / f"{name}.log").open("wb") as log:
            # A process of its own: what one leaves in memory, or breaks, is not the next one's.
            command = (sys.executable, "-m", "families", "one", name)
            code = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False).returncode
        typer.echo(f"{name}: exit code {code}")
    found = write_page()
    tried_now = [CANDIDATES[name] for name in only or CANDIDATES]
    if failed := [text for each in tried_now for text in wrong(each, found.get(each.name))]:
        typer.echo("\n".join(failed))
        raise typer.Exit(EXIT_FAILED)


@app.command("page")
def write_page() -> dict[str, Row]:
    """Write docs/models.md from the results of all, without a run."""
    found = {n: Row.read(f) for n in CANDIDATES if (f := MEASURED / f"{n}.json").is_file()}
    PAGE.write_text(page(found))
    typer.echo(f"wrote {PAGE.relative_to(ROOT)}")
    return found


@app.command()
def one(name: str) -> None:
    """Try one family or format; a step of `run`."""
    (MEASURED / f"{name}.json").unlink(missing_ok=True)
    facts = machine()
    with open_session() as session:
        row = tried(CANDIDATES[name], session)
    row.machine = f"{facts.get('cores', '?')} cores of {facts.get('processor')}"
    row.write(MEASURED)


if __name__ == "__main__":
    app()
