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
    def step(self, text: str, total: int | None = None) -> None:
        """Show nothing."""

    def advance(self) -> None:
        """Show nothing."""
