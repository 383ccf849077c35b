"""What a measurement shows: its errors, its progress, figures with limits, and a report of them."""

import io
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import BaseModel, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_after_validator_function
from rich.table import Column, Table

from proofserve.wire.records import first_problem

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
VERDICTS = {True: "[green]PASS[/green]", False: "[red]FAIL[/red]", None: ""}
WIDTH: Final = 9.0
"""Inches, of all pictures."""
# Of what a picture shows.
GREEN, BLUE, RED = "tab:green", "tab:blue", "tab:red"


@dataclass(frozen=True, slots=True)
class FieldsOf:
    """Says of a dict in a report that it has the fields of a dataclass."""

    of: type

    def __get_pydantic_core_schema__(
        self, _source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return no_info_after_validator_function(asdict, handler.generate_schema(self.of))


class ReportedError(RuntimeError):
    """An error whose text says all that a user needs: commands print it, without a traceback."""


class NodeError(ReportedError):
    """A node refused a call or could not be reached: its answer's text and ``status``, if any."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class TooSlowError(ReportedError):
    """An event that a measurement waits for did not happen in time."""


class Progress:
    """How a long measurement tells where it is; this one shows nothing."""

    def step(self, text: str, total: int | None = None) -> None:
        """Say what begins, and of how many parts it consists."""

    def advance(self) -> None:
        """Say that one part is done."""

    def layer(self, index: int, of: int) -> None:
        """Say which layer the step has passed, of how many."""

    def over(self, text: str, items: Collection[T]) -> Iterator[T]:
        """A step of which each of ``items`` is a part, done when the next one is asked for."""
        self.step(text, len(items))
        for each in items:
            yield each
            self.advance()


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound that a figure must reach, or with ``at_most`` must not exceed."""

    bound: float
    at_most: bool = False

    def holds(self, value: float) -> bool:
        """Whether ``value`` keeps the limit; NaN never does."""
        return value <= self.bound if self.at_most else value >= self.bound

    def __str__(self) -> str:
        return f"{'<=' if self.at_most else '>='} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number and what it means. ``value`` is None when nothing could be measured."""

    name: str
    value: float | None
    meaning: str
    limit: Limit | None = None

    @property
    def passed(self) -> bool | None:
        """Whether the limit holds; None without a limit, False if nothing was measured."""
        if self.limit is None:
            return None
        return self.value is not None and self.limit.holds(self.value)


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


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` in lines that people can read. Raises OSError."""
    path.write_text(written(content), encoding="utf-8")


def written(content: Any) -> str:
    """The text of ``write_json``."""
    return json.dumps(content, indent=2) + "\n"


def read_json(path: Path, model: type[Model]) -> Model:
    """The content of a file as ``model``. Raises ReportedError naming the field that is wrong."""
    try:
        return parsed(path.read_bytes(), model, str(path))
    except OSError as error:
        raise ReportedError(f"cannot read {path}: {error.strerror}") from error


def parsed(content: bytes, model: type[Model], source: str) -> Model:
    """JSON from ``source`` as ``model``. Raises ReportedError naming the field that is wrong."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        where, why = first_problem(error, "not JSON of the expected kind")
        raise ReportedError(f"{source}: {where}: {why}") from error


def drawn(panels: Sequence[Callable[["Axes"], None]], height: float) -> str:
    """One picture with ``panels`` side by side, ``height`` in inches."""
    # Only commands that draw wait for this import.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    for axes, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes)
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg") :]
