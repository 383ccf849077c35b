"""The command line: ``python -m matrix``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from matrix.columns import FOLDER, columns
from matrix.page import REFERENCE, page, passed
from matrix.results import MEASURED, SCHEMES, ColumnResult, write_vectors
from matrix.trial import try_column
from measuring.files import DOCS
from measuring.results import chosen, machine_text, write_page
from proofserve.cli.session import EXIT_FAILED, open_session

PAGE = DOCS / "versions.md"

app = typer.Typer(help="Every vetted vLLM on this machine's CPU.")


@app.command()
def run(
    only: Annotated[
        list[str] | None, typer.Option(help="A column such as 0.31-V1; repeat it for several.")
    ] = None,
) -> None:
    """Run the columns and write docs/versions.md. Exit code 1 if one of them failed.

    \b
    Columns that do not run now keep their results, which are files in matrix/measured.
    """
    known = {column.name: column for column in columns()}
    names = chosen(only, known, "columns")
    logs = FOLDER / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    for name in names:
        tried = try_column(known[name], logs, typer.echo)
        MEASURED.write(name, replace(tried, machine=machine_text()))
    found = page_of_results()
    reference = found.get(REFERENCE)
    wrong = [
        name
        for name in names
        if not known[name].skipped and not passed(known[name], found[name], reference)
    ]
    if wrong:
        typer.echo(f"not passed: {', '.join(wrong)}")
        raise typer.Exit(EXIT_FAILED)


@app.command("page")
def page_of_results() -> dict[str, ColumnResult]:
    """Write docs/versions.md from the results of all columns, without a run."""
    wanted = columns()
    found = MEASURED.all(column.name for column in wanted)
    write_page(PAGE, page(wanted, found))
    return found


@app.command()
def vectors(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(SCHEMES)}.")],
    folder: Annotated[Path, typer.Argument(help="Where the vectors go, as MODEL.json.")],
) -> None:
    """Prove fixed nonces on a server of this environment's vLLM; a step of each column."""
    with open_session() as session:
        write_vectors(model, folder, session)


if __name__ == "__main__":
    app()
