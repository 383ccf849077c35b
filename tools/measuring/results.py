"""Results as files that a later run goes on from, and the tables and pages that show them."""

import csv
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from pathlib import Path
from typing import Generic, TypeVar

import typer
from pydantic import TypeAdapter

from measuring.files import ROOT, write_whole
from proofserve.host import machine

T = TypeVar("T")
Row = Sequence[str]


class Kept(Generic[T]):
    """Results of one kind, each a file of ``folder``: it can be measured again alone, anywhere."""

    def __init__(self, kind: type[T], folder: Path) -> None:
        self._adapter = TypeAdapter(kind)
        self._folder = folder

    def file(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def write(self, name: str, result: T) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.file(name), self._adapter.dump_json(result, indent=1).decode() + "\n")

    def read(self, name: str) -> T | None:
        """None without a file. Raises ValueError for one of another form."""
        file = self.file(name)
        return self._adapter.validate_json(file.read_bytes()) if file.is_file() else None

    def all(self, names: Iterable[str]) -> dict[str, T]:
        """Those that have a file, in the order of ``names``."""
        return {name: found for name in names if (found := self.read(name)) is not None}


def table(head: Row, rows: Iterable[Row], rule: str = "---") -> str:
    """In Markdown; ``rule`` is a cell of the line below the head."""
    lines = [table_rows([head]), f"|{f'{rule}|' * len(head)}", table_rows(rows)]
    return "\n".join(filter(None, lines))


def table_rows(rows: Iterable[Row]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def csv_text(head: Row, rows: Iterable[Row]) -> str:
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows])
    return text.getvalue()


def write_page(file: Path, text: str, tell: Callable[[str], None] = typer.echo) -> None:
    file.write_text(text)
    tell(f"wrote {file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}")


def machine_text() -> str:
    """This machine in words."""
    facts = machine()
    return f"{facts['cores']} cores of {facts['processor']}"


def chosen(names: Sequence[str] | None, known: Iterable[str], what: str) -> list[str]:
    """``names``, or all that are ``known``. Raises BadParameter for another name."""
    every = list(known)
    if unknown := set(names or ()) - set(every):
        raise typer.BadParameter(f"{', '.join(unknown)}; the {what} are {', '.join(every)}")
    return list(names or every)
