"""The shape of the repository: sizes, folders, names, words; version and changelog."""

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "proofserve"
SOURCES = sorted(SOURCE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MODULES_PER_FOLDER = 16
STATEMENT_LINES = 40
# Subjects that hide who acts; the reader must know: client, operator, backend, validator, engine.
HIDDEN = re.compile(r"\b(somebody|anybody|nobody|whoever|somebody else)\b", re.IGNORECASE)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize(("files", "most"), [(SOURCES, 450), (TESTS, 450)], ids=["src", "tests"])
def test_a_file_is_of_a_readable_size(files: list[Path], most: int) -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > most} == {}


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Each function and its lines. The parameters of a command are its options, and are many."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            yield f"{name_of(path)}: {node.name}", (node.end_lineno or 0) - first.lineno + 1


def test_a_function_is_of_a_readable_size() -> None:
    found = [each for path in SOURCES for each in functions(path)]
    assert [each for each in found if each[1] > STATEMENT_LINES] == []


def test_a_folder_has_few_modules() -> None:
    modules = Counter(name_of(path.parent) for path in SOURCES if path.name != "__init__.py")
    assert {name: n for name, n in modules.items() if n > MODULES_PER_FOLDER} == {}


def test_a_class_name_means_one_thing() -> None:
    names = Counter(
        node.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, n in names.items() if n > 1} == set()


def test_a_file_says_what_it_is() -> None:
    silent = [name_of(path) for path in SOURCES if not path.read_text().startswith('"""')]
    assert silent == []


def test_a_file_says_who_acts() -> None:
    hidden = {name_of(path): HIDDEN.findall(path.read_text()) for path in SOURCES}
    assert {name: words for name, words in hidden.items() if words} == {}


def test_every_test_file_is_collected() -> None:
    stray = [
        path
        for path in TESTS
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
