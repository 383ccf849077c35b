"""The commands in the fenced blocks of a page, as a reader would copy them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

# Blocks with a language are no commands.
_FENCE = "```"
# With or without ``export``: a word, a text in quotes, or what a command prints.
_ASSIGNMENT = re.compile(r'(?:export )?[A-Z_]+=(?:"[^"]*"|\$\([^)]*\)|\S+)(?:\s+#.*)?$')


@dataclass(frozen=True, slots=True)
class PageCommand:
    """``text`` is the whole command with its comment; ``section`` the nearest heading above it."""

    section: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @property
    def is_assignment(self) -> bool:
        return _ASSIGNMENT.match(self.text) is not None


def commands_of(page: str) -> Iterator[PageCommand]:
    """Every command of ``page`` in its order. Raises ValueError for one that does not end."""
    section, kind, begun = "", None, ""
    for line in page.splitlines():
        if line.startswith(_FENCE):
            if begun:
                raise ValueError(f"{section}: a command does not end: {begun}")
            kind = line.removeprefix(_FENCE) if kind is None else None
        elif kind is None:
            section = line.lstrip("# ") if line.startswith("#") else section
        elif kind == "":
            begun = f"{begun}\n{line}" if begun else line
            if _is_whole(begun):
                if shlex.split(begun, comments=True):
                    yield PageCommand(section, begun)
                begun = ""


def _is_whole(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:
        # A quotation goes on in the next line.
        return False
    return not text.endswith("\\")
