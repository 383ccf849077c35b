"""The client's side of an exchange."""

from typing import Protocol


class Ended(Protocol):
    """An exchange that has ended."""

    keep_alive: bool


class Connection(Protocol):
    """One connection of a client."""

    @property
    def write_paused(self) -> bool:
        """Whether the client reads more slowly than the backend writes."""

    def write(self, data: bytes) -> None:
        """Send to the client."""

    def answered(self, exchange: Ended) -> None:
        """The exchange has ended; the connection may serve another if it is ``keep_alive``."""

    def abort(self) -> None:
        """Cut the connection, so that the client sees that its answer is not complete."""
