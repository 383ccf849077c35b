"""The client's side of an exchange."""

from typing import Protocol


class Ended(Protocol):
    """An exchange whose client has its answer."""

    keep_alive: bool


class Connection(Protocol):
    """One connection of a client."""

    @property
    def write_paused(self) -> bool:
        """Whether the client takes less than it was given."""

    def write(self, data: bytes) -> None:
        """Send to the client."""

    def answered(self, exchange: Ended) -> None:
        """The exchange has ended; the connection may serve another if it is ``keep_alive``."""

    def abort(self) -> None:
        """Cut the connection: what was sent is no complete answer."""
