"""How a long measurement tells the person who waits for it what it is doing."""

from typing import Protocol


class Progress(Protocol):
    """Shows one step at a time."""

    def step(self, text: str, total: int | None = None) -> None:
        """A step begins; ``total`` is how many times ``advance`` will be called, if known."""
        ...

    def advance(self) -> None:
        """One part of the current step is done."""
        ...


class Silence:
    """Tells nobody anything."""

    def step(self, text: str, total: int | None = None) -> None:
        """Ignored."""

    def advance(self) -> None:
        """Ignored."""
