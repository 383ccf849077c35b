"""The command line: ``python -m families``."""

from typing import Annotated

import typer

from families.candidates import CANDIDATES, FOLDER
from families.page import page, wrong
from families.results import MEASURED, Row
from families.trial import tried
from measuring.files import DOCS
from measuring.jobs import Job
from measuring.results import chosen, machine_text, write_page
from proofserve.cli.session import EXIT_FAILED, open_session

PAGE = DOCS / "models.md"

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
    names = chosen(only, CANDIDATES, "families and formats")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in names:
        typer.echo(f"{name} ...")
        # A process of its own: what one leaves in memory, or breaks, is not the next one's.
        ended = Job(name, ("-m", "families", "one", name)).run(FOLDER / f"{name}.log")
        typer.echo(f"{name}: exit code {ended.code}")
    found = page_of_results()
    if failed := [text for name in names for text in wrong(CANDIDATES[name], found.get(name))]:
        typer.echo("\n".join(failed))
        raise typer.Exit(EXIT_FAILED)


@app.command("page")
def page_of_results() -> dict[str, Row]:
    """Write docs/models.md from the results of all, without a run."""
    found = MEASURED.all(CANDIDATES)
    write_page(PAGE, page(found))
    return found


@app.command()
def one(name: str) -> None:
    """Try one family or format; a step of `run`."""
    MEASURED.file(name).unlink(missing_ok=True)
    with open_session() as session:
        row = tried(CANDIDATES[name], session)
    row.machine = machine_text()
    MEASURED.write(name, row)


if __name__ == "__main__":
    app()
