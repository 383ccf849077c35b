"""docs/fleet.md lists the options of a controller, no more and no less."""

from pathlib import Path

from proofserve.cli.fleet import FLEET_OPTIONS
from test_docs import rows, shown

PAGE = Path(__file__).parents[2] / "docs" / "fleet.md"


def test_every_option_of_a_controller_with_its_default() -> None:
    expected = [
        [f"`{FLEET_OPTIONS.flag(name)}`", shown(each.default)]
        for name, each in FLEET_OPTIONS.fields.items()
    ]
    assert [row[:2] for row in rows("Options and variables", PAGE.read_text())] == expected


def test_the_page_says_how_an_option_is_spelled_as_a_variable() -> None:
    for name in FLEET_OPTIONS.fields:
        spelled = FLEET_OPTIONS.flag(name).removeprefix("--").replace("-", "_").upper()
        assert FLEET_OPTIONS.variable(name) == f"FLEET_{spelled}"
