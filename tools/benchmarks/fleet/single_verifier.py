"""Verifies without queues: ``python -m benchmarks.fleet.single_verifier ...``.

It computes what ``proofserve verify`` computes, once to load the checkpoint, writes the file
``ready``, waits for the file ``go`` beside its own folder, and then verifies again and again.
"""

import json
import pickle
import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from measuring.files import write_whole
from proofserve.fleet.verification_records import VerdictOutcome
from proofserve.verifier.nodes.member_jobs import CheckpointTruths, check_sample

READY, GO, DONE = "ready", "go", "done.json"


def main(
    task_file: Annotated[Path, typer.Argument(help="a VerificationTask, pickled")],
    model: Annotated[Path, typer.Argument(help="the checkpoint")],
    count: Annotated[int, typer.Argument(help="verifications")],
) -> None:
    """Verify ``count`` times, and write when the last one ended."""
    # The benchmark wrote the file a moment ago.
    task = pickle.loads(task_file.read_bytes())  # noqa: S301
    check = partial(check_sample, truth=CheckpointTruths({task.job.queue: model}))
    check(task)
    Path(READY).touch()
    while not (task_file.parent / GO).exists():
        time.sleep(0.005)
    found = [check(task).outcome for _ in range(count)]
    if set(found) != {VerdictOutcome.HONEST}:
        raise SystemExit(f"verdicts are {', '.join(found)}")
    write_whole(Path(DONE), json.dumps(time.time()))


if __name__ == "__main__":
    typer.run(main)
