"""``proofserve fleet worker``: its options are the settings of a worker."""

import asyncio
import inspect
from typing import Any

import typer

from proofserve.cli.fleet.process_log import start_log
from proofserve.cli.fleet.serve import REFUSED
from proofserve.cli.serve import SettingOptions
from proofserve.rounds.errors import OutboxUnavailable
from proofserve.settings.fleet import FleetWorkerSettings

WORKER_OPTIONS = SettingOptions(FleetWorkerSettings, lambda name: f"--{name.replace('_', '-')}")


def worker(**given: Any) -> None:
    """Verify members: take jobs from the fleet's database, recompute, and store verdicts.

    \b
    proofserve fleet worker --model ./model
    proofserve fleet worker --database postgresql://fleet@db/fleet --model ./model --device cuda

    A worker takes the jobs of members that serve the weights in --model. Start as many
    as needed: each job goes to one of them. After SIGTERM a worker takes no more jobs; one that
    it had begun goes to another worker.
    """
    try:
        from proofserve.wiring.verification import checkpoints  # noqa: PLC0415
        from proofserve.wiring.verification.worker import run_worker  # noqa: PLC0415
    except ModuleNotFoundError as error:
        text = f"{error.name} is not installed: pip install 'proofserve[fleet,reference]'"
        typer.echo(text, err=True)
        raise typer.Exit(REFUSED) from error
    chosen = WORKER_OPTIONS.chosen(given)
    start_log()
    try:
        found = checkpoints.worker_checkpoints(chosen)
        checker = checkpoints.checker_of(chosen, found)
        asyncio.run(run_worker(chosen, tuple(found.folders), checker.check))
    except (ValueError, OSError, OutboxUnavailable) as error:
        typer.echo(f"proofserve fleet worker: {error}", err=True)
        raise typer.Exit(REFUSED) from error


worker.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
    WORKER_OPTIONS.parameters()
)
