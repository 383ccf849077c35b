"""A worker whose computation is a pause: ``python -m benchmarks.fleet.sleeping_worker ...``."""

import asyncio
import time
from typing import Annotated

import typer

from proofserve.fleet.verification_records import JobFinding, VerdictOutcome, VerificationTask
from proofserve.settings.fleet import FleetWorkerSettings
from proofserve.wiring.fleet_worker import run_worker

QUEUE = "weights:benchmark"


def main(
    database: Annotated[str, typer.Argument(help="the fleet's database")],
    sleep_s: Annotated[float, typer.Argument(help="the computation of a job, seconds")],
) -> None:
    """Take jobs until a signal; every verdict is honest."""

    def check(task: VerificationTask) -> JobFinding:
        time.sleep(sleep_s)
        nonces = len(task.sample.nonces)
        return JobFinding(
            VerdictOutcome.HONEST, sleep_s, nonces=nonces, distances=(0.0,) * nonces, report={}
        )

    settings = FleetWorkerSettings(database=database, stop_wait_sec=0)
    asyncio.run(run_worker(settings, (QUEUE,), check))


if __name__ == "__main__":
    typer.run(main)
