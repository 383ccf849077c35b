"""What the model reads: Python's language reference, docstrings of its library, some prose."""

import ast
import inspect
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Final

from proofserve.models.architectures import corpus

# Tests and programs of the standard library, whose docstrings explain little to a reader.
LEFT_OUT: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip"}
)
_NAMED: Final = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Docstring:
    """``name`` has its module and class in front, with dots."""

    name: str
    text: str


def docstrings() -> list[Docstring]:
    """Every docstring of the standard library, in the order of its files.

    The modules are parsed and not imported: some act when they are imported.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Docstring] = []
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if LEFT_OUT.isdisjoint(parts):
            module = ".".join(part for part in parts if part != "__init__")
            found += _of(ast.parse(file.read_text("utf-8")), module)
    return found


def _of(node: ast.AST, name: str) -> Iterator[Docstring]:
    if isinstance(node, ast.Module | _NAMED) and (text := ast.get_docstring(node)):
        yield Docstring(name, inspect.cleandoc(text))
    for child in ast.iter_child_nodes(node):
        yield from _of(child, f"{name}.{child.name}" if isinstance(child, _NAMED) else name)


def documents() -> list[str]:
    """The texts beside the docstrings."""
    return [*corpus().split("\n\n"), *(text for _, text in sorted(topics.items()))]


def explained(entries: list[Docstring]) -> list[str]:
    return [f"{entry.name}\n\n{entry.text}\n" for entry in entries]
