"""The shape of the house: file sizes, tests beside what they test, version and changelog."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "proofserve"
SOURCES = sorted(SOURCE.rglob("*.py"))
MAX_LINES = 400


@pytest.mark.parametrize("path", [*SOURCES, *sorted((ROOT / "tests").rglob("*.py"))], ids=str)
def test_a_file_has_one_job_and_fits_a_screen_or_ten(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_file_says_what_it_is(path: Path) -> None:
    assert path.read_text().startswith('"""')


def test_every_test_file_is_collected() -> None:
    stray = [
        path
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"^(async )?def test_", path.read_text(), re.MULTILINE)
        and not path.name.startswith("test_")
    ]
    assert stray == []


def test_the_changelog_begins_with_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == version
    assert f'__version__ = "{version}"' in (SOURCE / "__init__.py").read_text()


def test_only_settings_reads_the_environment() -> None:
    readers = [
        str(path.relative_to(SOURCE))
        for path in SOURCES
        if re.search(r"os\.(environ|getenv)", path.read_text())
    ]
    assert readers == ["settings/process.py"]
