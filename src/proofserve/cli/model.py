"""``proofserve model``: small checkpoints for tests, demos and benchmarks."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(help="Make small, seeded checkpoints that load like any other.")


@app.callback()
def _group() -> None:
    """Make small, seeded checkpoints that load like any other."""


@app.command("new")
def new(
    directory: Annotated[Path, typer.Argument(help="Folder to create; must not hold files yet.")],
    arch: Annotated[str, typer.Option(help="qwen3, llama or gemma3.")] = "qwen3",
    size: Annotated[str, typer.Option(help="tiny (a few MB), small (100M) or 0.6b.")] = "tiny",
    seed: Annotated[int, typer.Option(help="Another seed is another model.")] = 0,
) -> None:
    """Write a checkpoint with seeded random weights in which every layer matters.

    \b
    proofserve model new ./tiny --arch qwen3 --size tiny
    proofserve serve ./tiny --enable-poc --enforce-eager --max-model-len 2048
    """
    # Costs seconds, and needs an extra, that the other commands do without.
    from proofserve.models import write_model  # noqa: PLC0415

    console = Console()
    try:
        with console.status(f"writing {arch} {size} to {directory} ..."):
            summary = write_model(directory, arch, size, seed)
    except (ValueError, FileExistsError) as error:
        console.print(f"[red]{error}[/red]")
        raise typer.Exit(2) from error
    console.print(
        f"{summary.path}: {summary.arch} {summary.size}, "
        f"{summary.parameters / 1e6:.1f}M parameters, {summary.bytes / 1e6:.1f} MB"
    )
