"""``docs/versions.md``: the results of all columns as a table, and how to read it."""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from matrix.columns import Column
from matrix.results import NONCES, SCHEMES, SEQ_LEN, ColumnResult
from matrix.trial import MODEL
from measuring.results import table
from proofserve.engines.vetting.features import MATRIX, VETTED
from proofserve.models.trained import TRAINED_MODELS
from proofserve.verifier.calibration_file import CalibrationFile
from proofserve_lab.checkpoints import trained_calibration

REFERENCE = "0.32-V1"
STEPS = ("contract", "smoke", "e2e", "coexist", "chat first")
TEXT = Path(__file__).with_suffix(".txt")


def page(wanted: Sequence[Column], found: Mapping[str, ColumnResult]) -> str:
    """The text of the page; ``found`` holds results by the names of their columns."""
    reference = found.get(REFERENCE)
    rows = [_row(column, found.get(column.name), reference) for column in wanted]
    head = ["vLLM", "runner", "passed", *STEPS, *SCHEMES, "seconds", "nonces/s"]
    skipped = [f"{c.name}: skipped, {c.skipped}." for c in wanted if c.skipped]
    return TEXT.read_text().format(
        table="\n\n".join([table(head, rows, rule=" --- "), *skipped]),
        machines=_machines([found[c.name] for c in wanted if c.name in found]),
        scheme=SCHEMES[MODEL],
        seq_len=SEQ_LEN,
        nonces=NONCES,
        reference=REFERENCE.replace("-", " on "),
        schemes=" and ".join(f"{model} by {scheme}" for model, scheme in SCHEMES.items()),
        limits=" and ".join(f"{limit:.4f}" for limit in honest_noise().values()),
        vetted=", ".join(v.minor for v in VETTED),
        others="".join(
            f"; {v.minor}: {rest.lstrip(',; ')}"
            for v in VETTED
            if (rest := v.how.removeprefix(MATRIX))
        ).lstrip("; "),
    )


def _machines(found: Sequence[ColumnResult]) -> str:
    """Each machine with its columns, or alone if all columns ran on it."""
    names: dict[str, list[str]] = {}
    for each in found:
        names.setdefault(each.machine, []).append(each.name)
    if len(names) == 1:
        return f"on {next(iter(names))}"
    return "; ".join(f"{', '.join(columns)} on {machine}" for machine, columns in names.items())


@cache
def honest_noise() -> dict[str, float]:
    """The largest error of vLLM on a processor, of the kernel that errs least so (L2), by model."""
    found = {}
    for model, scheme in SCHEMES.items():
        with trained_calibration(scheme, TRAINED_MODELS[model]) as file:
            found[model] = min(
                max(each.figures.lengths)
                for each in CalibrationFile.read(file).populations
                if each.facts.name.startswith("vLLM on x86")
            )
    return found


def passed(column: Column, result: ColumnResult, reference: ColumnResult | None) -> bool:
    far, limits = _distances(result, reference), honest_noise()
    near = set(far) == set(column.models) and all(far[model] <= limits[model] for model in far)
    return bool(result.steps) and near and all(step.passed for step in result.steps)


def _distances(result: ColumnResult, reference: ColumnResult | None) -> dict[str, float]:
    """The largest distance to the reference, by model that both measured."""
    theirs = reference.measured if reference else {}
    return {
        model: made.largest_distance(theirs[model])
        for model, made in result.measured.items()
        if model in theirs
    }


def _row(column: Column, result: ColumnResult | None, reference: ColumnResult | None) -> list[str]:
    if result is None or column.skipped:
        word = "skipped" if column.skipped else "not run"
        return [column.minor, column.runner, word, *[""] * (len(STEPS) + len(SCHEMES) + 2)]
    by_name = {step.name: step for step in result.steps}
    verdicts = [
        "" if name not in by_name else "yes" if by_name[name].passed else "**no**" for name in STEPS
    ]
    made, far = result.measured.get(MODEL), _distances(result, reference)
    return [
        made.vllm if made else column.minor,
        column.runner,
        "**yes**" if passed(column, result, reference) else "**no**",
        *verdicts,
        *(_distance(far.get(model), model in column.models) for model in SCHEMES),
        f"{result.seconds:.0f}",
        "" if made is None else f"{made.nonces_per_second:.0f}",
    ]


def _distance(far: float | None, is_tried: bool) -> str:
    if not is_tried:
        return "refused"
    return "" if far is None else f"{far:.4f}"
