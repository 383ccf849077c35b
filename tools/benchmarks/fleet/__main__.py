"""Measure a fleet: ``python -m benchmarks.fleet --help``."""

import typer

from benchmarks.fleet.ingest import ingest
from benchmarks.fleet.scale import scale
from benchmarks.fleet.verify import verify

app = typer.Typer(add_completion=False, no_args_is_help=True)
app.command()(ingest)
app.command()(scale)
app.command()(verify)

if __name__ == "__main__":
    app()
