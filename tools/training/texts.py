"""What the model reads: Python's language reference, docstrings of its library, some prose; chats.

By questions and answers the model knows when to speak and when its answer ends.
"""

import ast
import inspect
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Final

from proofserve.models.architectures import corpus

# Tests and programs of the standard library, whose docstrings explain little to a reader.
LEFT_OUT: Final = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip"}
)
WRITTEN: Final = Path(__file__).with_name("chats.txt")
# The few written chats are learned by heart.
WRITTEN_COPIES: Final = 40
ANSWER_CHARACTERS: Final = range(24, 400)

QUESTIONS: Final = (
    "What does {name} do?",
    "What is {name}?",
    "Explain {name} to me.",
    "Can you tell me about {name}?",
    "When would I use {name}?",
    "Tell me what {name} is for.",
    "I read {name} in a program. What is it?",
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


@dataclass(frozen=True, slots=True)
class Chat:
    question: str
    answer: str


def written_chats() -> list[Chat]:
    """The chats of ``chats.txt``: blocks of lines, questions and then their one answer."""
    found = []
    for block in WRITTEN.read_text("utf-8").strip().split("\n\n"):
        *questions, answer = block.split("\n")
        found += [Chat(question, answer) for question in questions]
    return found


def chats(entries: list[Docstring], random: Random) -> list[Chat]:
    """Chats about the standard library, and the written ones."""
    return [*_about(entries, random), *written_chats() * WRITTEN_COPIES]


def _about(entries: list[Docstring], random: Random) -> Iterator[Chat]:
    for entry in entries:
        private = any(part.startswith("_") for part in entry.name.split("."))
        answer = " ".join(entry.text.split("\n\n")[0].split())
        if not private and len(answer) in ANSWER_CHARACTERS and answer.isascii():
            short = ".".join(entry.name.split(".")[-2:])
            yield Chat(random.choice(QUESTIONS).format(name=short), _sentence(answer))


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text.endswith((".", "!", "?", ":")) else ".")
