"""Which batch of a lane is proved next, and by which engine core. It has no clock and no tasks.

Cores take batches of one lane as they become free, so a core that serves much chat proves little
and holds no other core up for long. Results leave in lane order, so what is stored is the same as
with one core: no hole, and one number as the progress of the round (ADR 30).
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class SharedLane(Generic[T]):
    """The batches of a lane from index ``start`` on, ``size`` nonces each; ``T`` is a result.

    A batch is named by the lane index of its first nonce. At most ``most_ahead`` batches are
    begun from the oldest one without a result on. ``cores`` are those that take batches.
    """

    start: int
    size: int
    most_ahead: int
    cores: set[int]
    _oldest: int = field(init=False)
    _results: dict[int, T] = field(default_factory=dict, init=False)
    # Batches that a core gave back, and that core.
    _returned: dict[int, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._oldest = self.start

    def take(self, core: int) -> int | None:
        """The next batch for ``core``; None while there is none for it.

        The oldest batch that another core gave back comes first: all results wait for it. A batch
        that ``core`` itself gave back is left to the other cores, if there are any: ``core`` could
        hold it up again.
        """
        alone = self.cores <= {core}
        if batches := [batch for batch, by in self._returned.items() if alone or by != core]:
            batch = min(batches)
            del self._returned[batch]
            return batch
        if self.start >= self._oldest + self.most_ahead * self.size:
            return None
        self.start += self.size
        return self.start - self.size

    def give_back(self, batch: int, core: int) -> None:
        """``core`` has no result of ``batch``, which another core may prove now."""
        self._returned[batch] = core

    def leave(self, core: int) -> None:
        """``core`` takes no more batches."""
        self.cores.discard(core)

    def finish(self, batch: int, result: T) -> None:
        self._results[batch] = result

    def pop(self) -> T | None:
        """The result of the oldest batch, which then counts as handed on; None without one."""
        result = self._results.pop(self._oldest, None)
        if result is not None:
            self._oldest += self.size
        return result
