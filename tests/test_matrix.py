"""The matrix of vLLM versions: its columns, its steps, its page. No version is started here."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from matrix import columns, trial
from matrix.__main__ import PAGE
from matrix.columns import Column
from matrix.page import REFERENCE, STEPS, honest_noise, page, passed
from matrix.results import MEASURED, SCHEMES, ColumnResult, Measured, StepResult
from matrix.trial import try_column
from measuring.jobs import Job
from measuring.results import Kept
from proofserve.engines.vetting.features import VETTED
from proofserve.protocol.codec import encode

COLUMN = Column("0.32", "V1")


def measured(shift: float = 0.0) -> Measured:
    vectors = np.array([[1.0, 0.0], [shift, 1.0]], dtype=np.float32)
    texts = dict(zip(("0", "1"), encode(vectors), strict=True))
    return Measured("0.31.2", 123.4, 2, texts)


def result(passed: bool = True, shift: float = 0.0, name: str = REFERENCE) -> ColumnResult:
    minor, runner = name.split("-")
    steps = [StepResult(each, passed, 10.0, "") for each in STEPS]
    return ColumnResult(
        minor,
        runner,
        machine="one core" if minor == "0.31" else "2 cores",
        steps=steps,
        measured=dict.fromkeys(SCHEMES, measured(shift)),
    )


def test_every_row_of_the_table_has_its_columns() -> None:
    made = {column.name: column for column in columns.columns()}
    for row in VETTED:
        for runner in row.runners:
            assert made[f"{row.minor}-{runner}"].skipped == ""
    assert set(made) >= {"0.32-V2", "0.33-V2"}
    assert all(c.skipped for c in made.values() if c.runner == "V2" and not vetted(c))


def vetted(column: Column) -> bool:
    return any(row.minor == column.minor and column.runner in row.runners for row in VETTED)


def test_every_version_but_the_installed_one_has_a_lock() -> None:
    minors = {row.minor for row in VETTED} - {columns.IN_VENV}
    needed = {"build", "0.26-torch", *(f"{minor}-wheels" for minor in columns.SOURCES_ONLY)}
    assert {lock.stem for lock in columns.LOCKS.iterdir()} == minors | needed


def test_the_environment_of_a_column(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "/before")
    monkeypatch.setattr(columns, "installed", lambda _minor: tmp_path)
    first = Column("0.31", "V1").variables()
    assert first["PYTHONPATH"].split(":") == [str(tmp_path), "/before"]
    assert first["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    second = Column("0.33", "V2").variables()
    assert second["PYTHONPATH"].split(":") == [str(tmp_path), str(columns.INTERPRETER), "/before"]
    assert (second["VLLM_USE_V2_MODEL_RUNNER"], second["TRITON_INTERPRET"]) == ("1", "1")


def test_no_step_stops_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = [Job(name, ("-c", code)) for name, code in (("first", "1 / 0"), ("second", "print(7)"))]
    monkeypatch.setattr(trial, "steps", lambda _column, _vectors: made)
    monkeypatch.setattr(columns, "installed", lambda _minor: None)
    told: list[str] = []
    found = try_column(Column("0.32", "V1"), tmp_path, told.append)
    assert [(s.name, s.passed, s.detail) for s in found.steps] == [
        ("first", False, "ZeroDivisionError: division by zero"),
        ("second", True, "7"),
    ]
    assert found.measured == {}
    assert "0.32-V1: first FAILED" in "\n".join(told)
    assert (tmp_path / "0.32-V1.second.log").read_text() == "7\n"


def test_a_step_that_hangs_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trial, "STEP_S", 0.1)
    made = [Job("x", ("-c", "while True: pass"))]
    monkeypatch.setattr(trial, "steps", lambda _column, _vectors: made)
    monkeypatch.setattr(columns, "installed", lambda _minor: None)
    found = try_column(Column("0.32", "V1"), tmp_path, lambda _text: None)
    assert not found.steps[0].passed


def test_a_version_that_pip_cannot_install_fails_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock = tmp_path / "0.29.lock"
    lock.write_text("no such requirement\n")
    monkeypatch.setattr(columns, "LOCKS", tmp_path)
    monkeypatch.setattr(columns, "FOLDER", tmp_path / "made")
    found = try_column(Column("0.29", "V1"), tmp_path, lambda _text: None)
    assert [(step.name, step.passed) for step in found.steps] == [("installation", False)]
    assert "no such requirement" in found.steps[0].detail
    assert not (tmp_path / "made" / "0.29" / ".lock-digest").exists()


def test_results_are_read_as_written(tmp_path: Path) -> None:
    kept = Kept(ColumnResult, tmp_path)
    for made in (result(), ColumnResult("0.33", "V2", skipped="why")):
        kept.write(made.name, made)
        assert kept.read(made.name) == made
    assert [*kept.all(["0.26-V1", REFERENCE])] == [REFERENCE]


def test_a_column_passes_by_its_steps_and_its_distance() -> None:
    limits, reference = honest_noise(), result()
    assert passed(COLUMN, result(), reference)
    assert passed(COLUMN, result(shift=min(limits.values()) / 2), reference)
    for model, limit in limits.items():
        far = dict(reference.measured) | {model: measured(limit * 2)}
        assert not passed(COLUMN, replace(reference, measured=far), reference)
    assert not passed(COLUMN, result(passed=False), reference)
    assert not passed(COLUMN, result(), None)
    assert not passed(COLUMN, ColumnResult("0.33", "V1", steps=result().steps), reference)
    assert not passed(COLUMN, ColumnResult("0.33", "V2", skipped="why"), reference)
    # A version that refuses the mixture is not asked for it.
    dense = replace(reference, measured={"trained": measured()})
    assert passed(Column("0.29", "V1"), dense, reference)
    assert not passed(COLUMN, dense, reference)


def test_the_page() -> None:
    wanted = [
        *(Column(minor, "V1") for minor in ("0.30", "0.31", "0.32", "0.33")),
        Column("0.33", "V2", "not yet"),
    ]
    found = {
        each.name: each
        for each in (result(), result(shift=1.0, name="0.31-V1"), result(False, name="0.33-V1"))
    }
    text = page(wanted, found)
    rows = {
        tuple(cells[1:3]): cells[3:]
        for line in text.splitlines()
        if line.startswith("| 0.")
        for cells in [[cell.strip() for cell in line.split("|")]]
    }
    assert rows["0.31.2", "V1"][0] == "**no**"
    assert "| 0.30 | V1 | not run |" in text
    assert "| 0.33 | V2 | skipped |" in text
    assert "0.33-V2: skipped, not yet." in text
    assert text.count("**yes**") == 1
    assert text.count("1.0000 | 1.0000 | 50 | 123") == 1
    assert "Measured 0.31-V1 on one core; 0.32-V1, 0.33-V1 on 2 cores. Nonces" in text


def test_the_page_is_of_the_results_that_are_kept() -> None:
    wanted = columns.columns()
    found = MEASURED.all(column.name for column in wanted)
    assert PAGE.read_text() == page(wanted, found)
