"""What runs in a column: each step is a command of its own, and none can stop the next."""

import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matrix.columns import Column
from matrix.installation import ROOT, InstallationFailed
from matrix.results import ColumnResult, StepResult, own_vectors

# A step that hangs ends after this, seconds.
STEP_S = 1800.0
MODEL = "trained"
CHAT_FIRST = (
    "tests/e2e/test_distance.py::test_chat_is_byte_identical_during_a_round",
    "tests/e2e/test_rounds.py::test_a_round_proves_in_the_gaps_that_chat_leaves",
)
PYTEST = ("-m", "pytest", "--quiet", "-p", "no:cacheprovider")


@dataclass(frozen=True, slots=True)
class Step:
    """``arguments`` are Python's."""

    name: str
    arguments: tuple[str, ...]


def steps(vectors: Mapping[str, Path]) -> list[Step]:
    """``vectors``: by model, the file of what its step proves."""
    checks = [
        Step(name, ("-m", "proofserve", "check", name, "--models", MODEL))
        for name in ("smoke", "e2e", "coexist")
    ]
    return [
        Step("contract", (*PYTEST, "tests/contract")),
        *checks,
        Step("chat first", (*PYTEST, *CHAT_FIRST)),
        *(
            Step(f"vectors of {model}", ("-m", "matrix", "vectors", model, str(file)))
            for model, file in vectors.items()
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
    files = {model: logs / f"{column.name}.{model}.json" for model in column.models}
    for file in files.values():
        file.unlink(missing_ok=True)
    found = []
    for step in steps(files):
        tell(f"{column.name}: {step.name} ...")
        found.append(_run(step, env, logs / f"{column.name}.{step.name.replace(' ', '-')}.log"))
        verdict = "passed" if found[-1].passed else "FAILED"
        tell(f"{column.name}: {step.name} {verdict}, {found[-1].seconds:.0f} s")
    return ColumnResult(column.minor, column.runner, steps=found, measured=own_vectors(files))


def _run(step: Step, env: Mapping[str, str], log: Path) -> StepResult:
    began = time.monotonic()
    with log.open("wb") as out:
        code = _exit_code((sys.executable, *step.arguments), env, out.fileno())
    lines = log.read_text(errors="replace").strip().splitlines()
    last = lines[-1].strip() if lines else f"exit code {code}"
    return StepResult(step.name, code == 0, time.monotonic() - began, last)


def _exit_code(argv: Sequence[str], env: Mapping[str, str], out: int) -> int | None:
    """The exit code of a command; None if it ran for ``STEP_S`` and was ended."""
    running = subprocess.Popen(argv, env=dict(env), cwd=ROOT, stdout=out, stderr=out)
    try:
        return running.wait(STEP_S)
    except subprocess.TimeoutExpired:
        # Its signal handlers stop the servers that it started.
        running.terminate()
        running.wait()
        return None
