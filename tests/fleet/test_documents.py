"""docs/fleet.md lists the options of a controller, no more and no less."""

from pathlib import Path

from proofserve.cli.fleet import FLEET_OPTIONS
from proofserve.cli.serve import allowed
from test_docs import rows, shown

PAGE = Path(__file__).parents[2] / "docs" / "fleet.md"


def test_every_option_of_a_controller_with_its_variable_default_and_range() -> None:
    expected = [
        [
            f"`{FLEET_OPTIONS.flag(name)}`",
            f"`{FLEET_OPTIONS.variable(name)}`",
            shown(each.default),
            allowed(each),
        ]
        for name, each in FLEET_OPTIONS.fields.items()
    ]
    assert [row[:4] for row in rows("Options and variables", PAGE.read_text())] == expected
