"""The figures of a benchmark as a table and as JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Column, Table

from proofserve.lab.report.figures import Figure
from proofserve.lab.report.json_files import write_json

VERDICTS = {True: "[green]PASS[/green]", False: "[red]FAIL[/red]", None: ""}


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one benchmark. ``setup`` holds its options, ``windows`` its raw readings."""

    title: str
    figures: tuple[Figure, ...]
    setup: Mapping[str, Any]
    windows: Mapping[str, Any]
    machine: Mapping[str, Any]

    @property
    def passed(self) -> bool:
        return all(figure.passed is not False for figure in self.figures)

    def table(self) -> Table:
        cores = [f"{self.machine['cores']} cores"] if "cores" in self.machine else []
        processor = [self.machine["processor"]] if "processor" in self.machine else []
        numbers = (Column(name, justify="right") for name in ("value", "limit"))
        table = Table("figure", *numbers, "", "meaning", title=self.title, title_justify="left")
        table.caption = ", ".join(cores + processor)
        for figure in self.figures:
            limit = str(figure.limit) if figure.limit else ""
            verdict = VERDICTS[figure.passed]
            table.add_row(figure.name, readable(figure.value), limit, verdict, figure.meaning)
        return table

    def json(self) -> dict[str, Any]:
        """Every figure under its own name, then limits, failures, setup, windows and machine."""
        return {
            **{figure.name: figure.value for figure in self.figures},
            "passed": self.passed,
            "limits": {f.name: str(f.limit) for f in self.figures if f.limit},
            "failed": [f.name for f in self.figures if f.passed is False],
            "setup": dict(self.setup),
            "windows": dict(self.windows),
            "machine": dict(self.machine),
        }

    def write(self, file: Path) -> None:
        write_json(file, self.json())


def readable(value: float | None) -> str:
    """A number with four significant digits, or whole from 1000 on; "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
