"""How many nonces may wait for the engine outside of rounds, all callers together."""

from collections.abc import Iterator
from contextlib import contextmanager

from proofserve.rounds.errors import QueueFull
from proofserve.rounds.records import QueueGauges


class NonceLimit:
    """Counts nonces from their admission to their end."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queued = 0

    @property
    def gauges(self) -> QueueGauges:
        """How full it is."""
        return QueueGauges(self._queued, self._limit)

    def admit(self, nonces: int) -> None:
        """Let so many in; they must be let out again. Raises QueueFull, with nothing changed."""
        if self._queued + nonces > self._limit:
            raise QueueFull(f"Queue full: {self._queued} nonces queued, limit is {self._limit}")
        self._queued += nonces

    def leave(self, nonces: int) -> None:
        """Let so many out."""
        self._queued -= nonces

    @contextmanager
    def admitted(self, nonces: int) -> Iterator[None]:
        """Let so many in for the length of a context. Raises QueueFull."""
        self.admit(nonces)
        try:
            yield
        finally:
            self.leave(nonces)
