"""Progress for people: one line that changes on a terminal, one line per step in a log file."""

from types import TracebackType
from typing import Self

from rich.console import Console


class ProgressLine:
    """Shows the current step as long as the context lasts; a ``lab.telling.Progress``."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("")
        self._text = ""
        self._total: int | None = None
        self._done = 0

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._status.stop()

    def step(self, text: str, total: int | None = None) -> None:
        """Show a new step."""
        self._text, self._total, self._done = text, total, 0
        self._status.update(f"{text} ...")
        if not self._console.is_terminal:
            self._console.print(f"{text} ...")

    def advance(self) -> None:
        """Count one part of the step."""
        self._done += 1
        of = f" of {self._total}" if self._total is not None else ""
        self._status.update(f"{self._text} ({self._done}{of}) ...")

    def seconds(self, elapsed: float) -> None:
        """Show how long the step has taken so far."""
        self._status.update(f"{self._text} ({elapsed:.0f} s) ...")
