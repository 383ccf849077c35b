"""How a long measurement reports its progress."""

from typing import Protocol


class Progress(Protocol):
    def step(self, text: str, total: int | None = None) -> None: ...

    def advance(self) -> None: ...


class NoProgress:
    def step(self, text: str, total: int | None = None) -> None:
        """Show nothing."""

    def advance(self) -> None:
        """Show nothing."""
