import json
from pathlib import Path

import pytest
from rich.console import Console

from proofserve.host import machine
from proofserve.reports import Figure, Limit, Report, readable

REPORT = Report(
    "title",
    (
        Figure("good", 1.5, "meaning of good", Limit(1)),
        Figure("bad", 3, "meaning of bad", Limit(2, at_most=True)),
        Figure("missing", None, "meaning of missing"),
    ),
    {"seq_len": 256},
    {"rates": [1.0, 2.0]},
    {"cores": 2, "processor": "a fast one"},
)


def test_the_table_shows_value_limit_and_verdict() -> None:
    console = Console(width=120, record=True, quiet=True)
    console.quiet = False
    with console.capture() as captured:
        console.print(REPORT.table())
    lines = captured.get().splitlines()
    (good,) = [line for line in lines if "meaning of good" in line]
    assert all(part in good for part in ("1.5", ">= 1", "PASS"))
    (bad,) = [line for line in lines if "meaning of bad" in line]
    assert all(part in bad for part in ("3", "<= 2", "FAIL"))
    assert any("2 cores, a fast one" in line for line in lines)


def test_the_file_holds_the_figures_by_name(tmp_path: Path) -> None:
    REPORT.write(tmp_path / "figures.json")
    read = json.loads((tmp_path / "figures.json").read_text())
    assert (read["good"], read["bad"], read["missing"]) == (1.5, 3, None)
    assert read["passed"] is False
    assert read["failed"] == ["bad"]
    assert read["limits"] == {"good": ">= 1", "bad": "<= 2"}
    assert read["windows"]["rates"] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (200, "200"), (0.98765, "0.9877"), (13604.8, "13,605"), (0.0, "0")],
)
def test_numbers_have_as_many_digits_as_one_cares_about(value: float | None, text: str) -> None:
    assert readable(value) == text


def test_the_machine_says_what_decides_figures() -> None:
    here = machine()
    assert isinstance(here["cores"], int)
    assert here["processor"]
    assert here["torch"]
