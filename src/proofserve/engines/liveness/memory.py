"""The memory in which an engine core and the API processes tell each other what they know.

It belongs to no file. The core makes it, and an API process opens it through the core's entry in
/proc, so the kernel frees it with the processes. Every value is a float of 8 bytes at a multiple of
8, which a reader never sees half written; values beside each other may be of different moments.
"""

import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import IntEnum
from mmap import mmap
from pathlib import Path

from proofserve.engines.vllm.support import UnsupportedEngine

# API processes of a server; each start of one takes the next place.
PLACES = 256


class Doing(IntEnum):
    """What the loop of an engine core does."""

    NOTHING = 0
    CHAT = 1
    PROOF = 2


@dataclass(frozen=True, slots=True)
class CoreRecord:
    """What a core writes. Times are in seconds of the monotonic clock, 0 if there is none.

    ``beat`` is when a thread of the core last wrote ``work`` (chat requests that it could step, and
    proof calls) and ``known`` (the same with requests that a paused scheduler or a silent client
    holds back). ``steps`` counts steps of chat that computed something, and proof forwards.
    """

    beat: float = 0.0
    steps: float = 0.0
    doing: float = Doing.NOTHING
    work: float = 0.0
    known: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryAddress:
    """Where an API process finds the memory: a descriptor of the core's process.

    ``token`` is its first value. ``place`` is where the API process writes.
    """

    process: int
    descriptor: int
    token: float
    place: int


# What an API process writes about a core: when, and how many of its chat requests and proof calls
# the core has not finished.
ServerRecord = tuple[float, float]

_CORE = {field.name: index for index, field in enumerate(fields(CoreRecord), start=1)}
_SERVERS = 8
_BYTES = 8 * (_SERVERS + PLACES * 2)


class CoreMemory:
    """One core's memory: a ``CoreReporter`` in the core, made by ``of_core`` in an API process."""

    def __init__(self, descriptor: int) -> None:
        self._values = memoryview(mmap(descriptor, _BYTES)).cast("B").cast("d")

    @staticmethod
    def of_core(address: MemoryAddress) -> "CoreMemory":
        """Raises OSError unless the address is that of a core on this machine."""
        path = Path(f"/proc/{address.process}/fd/{address.descriptor}")
        try:
            # Of another process with this id it could be a pipe, which would block.
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise OSError(f"{path} cannot be opened: {error.strerror}") from error
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode) or found.st_size != _BYTES:
                raise OSError(f"{path} is not the memory of an engine core")
            memory = CoreMemory(descriptor)
        finally:
            os.close(descriptor)
        if memory.token != address.token:
            raise OSError(f"{path} is the memory of another engine core")
        return memory

    @property
    def token(self) -> float:
        return self._values[0]

    def write(self, name: str, value: float) -> None:
        """Write one value of the core's record."""
        self._values[_CORE[name]] = value

    def read(self) -> CoreRecord:
        return CoreRecord(*self._values[1 : 1 + len(_CORE)].tolist())

    def write_server(self, place: int, record: ServerRecord) -> None:
        start = _SERVERS + place * 2
        # Backwards: a reader that sees the new time sees the new count.
        self._values[start + 1] = record[1]
        self._values[start] = record[0]

    def servers(self) -> list[ServerRecord]:
        """The records of all places that were ever written."""
        values = self._values[_SERVERS:].tolist()
        pairs = zip(values[::2], values[1::2], strict=True)
        return [(written, unfinished) for written, unfinished in pairs if written]


class CoreReporter(CoreMemory):
    """The core's side: makes the memory, writes its record, and never waits for a reader.

    ``doing`` and ``stepped`` are for the core's loop alone.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("proofserve-liveness")
        os.ftruncate(self._descriptor, _BYTES)
        super().__init__(self._descriptor)
        self._values[0] = float(secrets.randbits(52) + 1)
        self._doing = Doing.NOTHING
        self._steps = 0
        self._places = 0

    @contextmanager
    def doing(self, what: Doing) -> Iterator[None]:
        """The loop does ``what`` until the context ends, and then again what it did before."""
        before, self._doing = self._doing, what
        self.write("doing", what)
        try:
            yield
        finally:
            self._doing = before
            self.write("doing", before)

    def stepped(self) -> None:
        self._steps += 1
        self.write("steps", self._steps)

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
        self.write("work", work)
        self.write("known", known)
        # All processes of a machine share the monotonic clock.
        self.write("beat", time.monotonic())

    def join(self) -> MemoryAddress:
        """The address for one more API process. Raises UnsupportedEngine if there are too many."""
        if self._places == PLACES:
            raise UnsupportedEngine(f"more than {PLACES} API processes used this engine core")
        place, self._places = self._places, self._places + 1
        return MemoryAddress(os.getpid(), self._descriptor, self.token, place)
