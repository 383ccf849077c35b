"""The command line: ``python -m matrix``."""

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
from proofserve.lab.host import machine

PAGE = ROOT / "docs" / "versions.md"

app = typer.Typer(help="Every vetted vLLM on this machine's CPU.")


@app.command()
def run(
    only: Annotated[
        list[str] | None, typer.Option(help="A column such as 0.31-V1; repeat it for several.")
    ] = None,
) -> None:
    """Run the columns and write docs/versions.md. Exit code 1 if one of them failed.

    \b
    Results of columns that do not run now are kept from the last time.
    """
    known = {column.name: column for column in columns()}
    if unknown := set(only or ()) - set(known):
        raise typer.BadParameter(f"{', '.join(unknown)}; the columns are {', '.join(known)}")
    results = FOLDER / "results"
    results.mkdir(parents=True, exist_ok=True)
    for name in only or known:
        try_column(known[name], results, typer.echo).write(results)
    found = {n: ColumnResult.read(f) for n in known if (f := results / f"{n}.json").is_file()}
    PAGE.write_text(page(list(known.values()), found, _machine()))
    typer.echo(f"wrote {PAGE.relative_to(ROOT)}")
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
