"""An engine core's side: what it tells of its progress. It never waits for a reader."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from proofserve.engines.vllm.liveness.memory import PLACES, CoreMemory, Doing, MemoryAddress
from proofserve.engines.vllm.support import UnsupportedEngine


class CoreReporter:
    """Writes a core's record. ``doing`` and ``stepped`` are for the core's loop alone.

    ``now``: the monotonic clock, which all processes of a machine share, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._memory, self._descriptor = CoreMemory.new()
        self._now = now
        self._doing = Doing.NOTHING
        self._steps = 0
        self._places = 0

    @contextmanager
    def doing(self, what: Doing) -> Iterator[None]:
        """The loop does ``what`` until the context ends, and then again what it did before."""
        before, self._doing = self._doing, what
        self._memory.write("doing", what)
        try:
            yield
        finally:
            self._doing = before
            self._memory.write("doing", before)

    def stepped(self) -> None:
        self._steps += 1
        self._memory.write("steps", self._steps)

    @contextmanager
    def proving(self) -> Iterator[None]:
        """A proof forward runs; it counts as a step when the context ends, also if it failed."""
        with self.doing(Doing.PROOF):
            try:
                yield
            finally:
                self.stepped()

    def beat(self, work: int, known: int) -> None:
        """This process runs, and has this much work; see ``CoreRecord``."""
        self._memory.write("work", work)
        self._memory.write("known", known)
        self._memory.write("beat", self._now())

    def join(self) -> MemoryAddress:
        """The address for one more API process. Raises UnsupportedEngine if there are too many."""
        if self._places == PLACES:
            raise UnsupportedEngine(f"more than {PLACES} API processes used this engine core")
        place, self._places = self._places, self._places + 1
        return MemoryAddress(os.getpid(), self._descriptor, self._memory.token, place)
