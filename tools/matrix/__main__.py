"""The command line: ``python -m matrix``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from matrix.columns import columns
from matrix.installation import FOLDER, ROOT
from matrix.page import REFERENCE, honest_noise, page, passed
from matrix.results import ColumnResult
from matrix.trial import try_column
from matrix.vectors import SCHEMES, write_vectors
from proofserve.cli.session import EXIT_FAILED, open_session
from proofserve.host import machine

PAGE = ROOT / "docs" / "versions.md"
MEASURED = Path(__file__).parent / "measured"

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
    if unknown := set(only or ()) - set(known):
        raise typer.BadParameter(f"{', '.join(unknown)}; the columns are {', '.join(known)}")
    logs = FOLDER / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    MEASURED.mkdir(exist_ok=True)
    for name in only or known:
        tried = try_column(known[name], logs, typer.echo)
        replace(tried, machine=_machine()).write(MEASURED)
    found = write_page()
    reference = found.get(REFERENCE)
    wrong = [
        name
        for name in only or known
        if not known[name].skipped
        and not passed(known[name], found[name], reference, honest_noise())
    ]
    if wrong:
        typer.echo(f"not passed: {', '.join(wrong)}")
        raise typer.Exit(EXIT_FAILED)


@app.command("page")
def write_page() -> dict[str, ColumnResult]:
    """Write docs/versions.md from the results of all columns, without a run."""
    wanted = columns()
    files = {each.name: MEASURED / f"{each.name}.json" for each in wanted}
    found = {name: ColumnResult.read(file) for name, file in files.items() if file.is_file()}
    PAGE.write_text(page(wanted, found))
    typer.echo(f"wrote {PAGE.relative_to(ROOT)}")
    return found


@app.command()
def vectors(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(SCHEMES)}.")],
    file: Annotated[Path, typer.Argument(help="Where the vectors go, as JSON.")],
) -> None:
    """Prove fixed nonces on a server of this environment's vLLM; a step of each column."""
    with open_session() as session:
        write_vectors(model, file, session)


def _machine() -> str:
    facts = machine()
    return f"{facts.get('cores', '?')} cores of {facts.get('processor', 'an unknown processor')}"


if __name__ == "__main__":
    app()
