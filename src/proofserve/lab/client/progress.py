"""How a long measurement reports its progress."""

from typing import Protocol


class Progress(Protocol):
    """Shows the current step."""

    def step(self, text: str, total: int | None = None) -> None:
        """Begin a step with ``total`` parts, None if that is not known."""
        ...

    def advance(self) -> None:
        """Count one part of the current step as done."""
        ...


class NoProgress:
    """Shows nothing."""

    def step(self, text: str, total: int | None = None) -> None:
        """Ignored."""

    def advance(self) -> None:
        """Ignored."""
