"""Which tests run: by default all that can, and exact before the others."""

import pytest

from proofserve.reports import ReportedError
from proofserve.verifier.judging import ChosenTests, chosen_tests


@pytest.mark.parametrize(
    ("named", "has_engine", "has_figures", "chosen"),
    [
        ((), False, True, ChosenTests(exact=False, others=(), judges=True)),
        # Then the missing threshold is an error, as without any engine.
        ((), False, False, ChosenTests(exact=False, others=(), judges=True)),
        ((), True, False, ChosenTests(exact=True, others=(), judges=False)),
        ((), True, True, ChosenTests(exact=True, others=(), judges=True)),
        (("exact",), True, True, ChosenTests(exact=True, others=(), judges=False)),
        (("count",), True, True, ChosenTests(exact=False, others=("count",), judges=True)),
        (
            ("count", "exact", "count"),
            *(True, True),
            ChosenTests(exact=True, others=("count",), judges=True),
        ),
    ],
)
def test_the_tests_that_run(
    named: tuple[str, ...], has_engine: bool, has_figures: bool, chosen: ChosenTests
) -> None:
    assert chosen_tests(named, has_engine=has_engine, has_figures=has_figures) == chosen


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("scale", "--test scale: choose from exact, count"),
        ("exact", "--test exact: give an engine"),
    ],
)
def test_a_test_that_cannot_run_is_named(named: str, message: str) -> None:
    with pytest.raises(ReportedError, match=message):
        chosen_tests((named,), has_engine=False, has_figures=True)
