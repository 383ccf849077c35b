"""The command line: ``python -m endurance``."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from endurance import chaos as killing
from endurance import soak as soaking
from endurance.fleet.trial import fleet_chaos
from proofserve.cli.servers import scratch_folder
from proofserve.cli.session import EXIT_FAILED, CommandSession, open_session
from proofserve.reports import Report

app = typer.Typer(help="Long trials of node, receiver and gateway on this machine.")

KillSeed = Annotated[int, typer.Option(help="Another seed kills other processes at other moments.")]
Json = Annotated[Path | None, typer.Option(help="Also write every figure to this file.")]


@app.command()
def chaos(
    kills: Annotated[int, typer.Option(help="How many kills in all.", min=1)] = 50,
    seed: KillSeed = 0,
    json: Json = None,
) -> None:
    """Kill API server, engine core and receiver at random during rounds with chat.

    \b
    Afterwards every proof that /results ever showed must be in the outbox, and once at the
    receiver.
    A kill of the node costs a start of vLLM: 50 kills take about twenty minutes.
    """
    _run(lambda folder, session: killing.chaos(folder, kills, seed, session.line), json)


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(help="Minutes of load in all.", min=1.5)] = 10.0,
    seed: Annotated[int, typer.Option(help="Another seed changes when rounds start and stop.")] = 0,
    json: Json = None,
) -> None:
    """Four clients chat without a pause, rounds start and stop every few seconds.

    \b
    No chat may fail, and no process may hold more memory, files or threads
    than after a warm-up of 30 % of the trial, a minute at least.
    """
    _run(lambda folder, session: soaking.soak(folder, minutes, seed, session.line), json)


@app.command()
def fleet(
    kills: Annotated[int, typer.Option(help="How many kills in all.", min=1)] = 30,
    seed: KillSeed = 0,
    sqlite: Annotated[
        bool, typer.Option(help="One controller on an SQLite file instead of two on PostgreSQL.")
    ] = False,
    json: Json = None,
) -> None:
    """Kill controllers, members, workers and PostgreSQL at random during rounds of a fleet.

    \b
    Afterwards no lane may have been given twice, every proof of every member must be in
    the database once, and once at the receiver, and every job must have its one right verdict.
    """
    _run(
        lambda folder, session: fleet_chaos(
            folder, kills, seed, session.line, with_postgres=not sqlite
        ),
        json,
    )


def _run(trial: Callable[[Path, CommandSession], Report], json: Path | None) -> None:
    """Print the report of a trial. Exit with code 1 if a limit is broken."""
    with open_session() as session:
        with scratch_folder() as folder, session.interrupts.allowed():
            report = trial(folder, session)
        session.console.print(report.table())
        if json is not None:
            report.write(json)
    if not report.passed:
        raise typer.Exit(EXIT_FAILED)


if __name__ == "__main__":
    app()
