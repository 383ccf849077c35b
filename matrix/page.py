"""``docs/versions.md``: the results of all columns as a table, and how to read it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matrix.columns import Column
from matrix.results import ColumnResult, Measured
from matrix.vectors import NONCES, SCHEME, SEQ_LEN
from proofserve.cli.model import trained_calibration
from proofserve.engines.vetting.versions import VETTED
from proofserve.verifier.calibration_file import read

REFERENCE = "0.32-V1"
STEPS = ("contract", "smoke", "e2e", "coexist", "chat first")
TEXT = Path(__file__).with_suffix(".txt")


def page(wanted: Sequence[Column], found: Mapping[str, ColumnResult], machine: str) -> str:
    """The text of the page; ``found`` holds results by the names of their columns."""
    limit = honest_noise()
    reference = found[REFERENCE].measured if REFERENCE in found else None
    rows = [_row(column, found.get(column.name), reference, limit) for column in wanted]
    head = ["vLLM", "runner", "passed", *STEPS, "distance", "seconds", "nonces/s"]
    lines = [head, ["---"] * len(head), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    skipped = [f"{c.name}: skipped, {c.skipped}." for c in wanted if c.skipped]
    return TEXT.read_text().format(
        table="\n\n".join([table, *skipped]),
        machine=machine,
        scheme=SCHEME,
        seq_len=SEQ_LEN,
        nonces=NONCES,
        reference=REFERENCE.replace("-", " on "),
        limit=limit,
        vetted="\n".join(f"- {v.minor} ({', '.join(v.runners)}): {v.how}" for v in VETTED),
    )


def honest_noise() -> float:
    """The largest error of vLLM on a processor, of the kernel that errs least so (L2)."""
    with trained_calibration(SCHEME) as file:
        return min(
            max(each.figures.lengths)
            for each in read(file).populations
            if each.facts.name.startswith("vLLM on x86")
        )


def passed(result: ColumnResult, reference: Measured | None, limit: float) -> bool:
    if not result.steps or result.measured is None or reference is None:
        return False
    near = result.measured.largest_distance(reference) <= limit
    return near and all(step.passed for step in result.steps)


def _row(
    column: Column, result: ColumnResult | None, reference: Measured | None, limit: float
) -> list[str]:
    if result is None or column.skipped:
        word = "skipped" if column.skipped else "not run"
        return [column.minor, column.runner, word, *[""] * (len(STEPS) + 3)]
    by_name = {step.name: step for step in result.steps}
    verdicts = [
        "" if name not in by_name else "yes" if by_name[name].passed else "**no**" for name in STEPS
    ]
    made = result.measured
    far = made.largest_distance(reference) if made and reference else None
    return [
        made.vllm if made else column.minor,
        column.runner,
        "**yes**" if passed(result, reference, limit) else "**no**",
        *verdicts,
        "" if far is None else f"{far:.4f}",
        f"{result.seconds:.0f}",
        "" if made is None else f"{made.nonces_per_second:.0f}",
    ]
