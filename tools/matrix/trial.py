"""What runs in a column: each step is a command of its own, and none can stop the next."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from matrix.columns import Column, InstallationFailed
from matrix.results import ColumnResult, Measured, StepResult
from measuring.jobs import Job
from measuring.results import Kept

# A step that hangs ends after this, seconds.
STEP_S = 1800.0
MODEL = "trained"
CHAT_FIRST = (
    "tests/e2e/test_distance.py::test_chat_is_byte_identical_during_a_round",
    "tests/e2e/test_rounds.py::test_a_round_proves_in_the_gaps_that_chat_leaves",
)
PYTEST = ("-m", "pytest", "--quiet", "-p", "no:cacheprovider")


def steps(column: Column, vectors: Path) -> list[Job]:
    """``vectors`` is the folder of what a column proves."""
    checks = (
        Job(name, ("-m", "proofserve", "check", name, "--models", MODEL))
        for name in ("smoke", "e2e", "coexist")
    )
    return [
        Job("contract", (*PYTEST, "tests/contract")),
        *checks,
        Job("chat first", (*PYTEST, *CHAT_FIRST)),
        *(
            Job(f"vectors of {model}", ("-m", "matrix", "vectors", model, str(vectors)))
            for model in column.models
        ),
    ]


def try_column(column: Column, logs: Path, tell: Callable[[str], None]) -> ColumnResult:
    """Run every step of ``column``; what each one printed is in ``logs``."""
    if column.skipped:
        tell(f"{column.name}: skipped, {column.skipped}")
        return ColumnResult(column.minor, column.runner, skipped=column.skipped)
    tell(f"{column.name}: installing")
    began = time.monotonic()
    try:
        env = column.variables()
    except InstallationFailed as error:
        tell(f"{column.name}: not installed: {error}")
        failed = StepResult("installation", False, time.monotonic() - began, str(error))
        return ColumnResult(column.minor, column.runner, steps=[failed])
    vectors = logs / column.name
    proved = Kept(Measured, vectors)
    for model in column.models:
        proved.file(model).unlink(missing_ok=True)
    found = []
    for step in steps(column, vectors):
        tell(f"{column.name}: {step.name} ...")
        log = logs / f"{column.name}.{step.name.replace(' ', '-')}.log"
        found.append(_run(replace(step, env=env), log))
        verdict = "passed" if found[-1].passed else "FAILED"
        tell(f"{column.name}: {step.name} {verdict}, {found[-1].seconds:.0f} s")
    measured = proved.all(column.models)
    return ColumnResult(column.minor, column.runner, steps=found, measured=measured)


def _run(step: Job, log: Path) -> StepResult:
    ended = step.run(log, STEP_S)
    detail = ended.last_line or f"exit code {ended.code}"
    return StepResult(step.name, ended.code == 0, ended.seconds, detail)
