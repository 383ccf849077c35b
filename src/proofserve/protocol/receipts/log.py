"""The public log of receipts: a chain of roots, one for each second that had any.

Only the log proves when a receipt was made: a validator that has seen an entry cannot be shown
another one in its place, because every entry names the hash of the one before.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from proofserve.protocol.commitments import opens, paths, root
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.shake import u64

_ENTRY = b"\x02"
FIRST_PREVIOUS = bytes(32)


@dataclass(frozen=True, slots=True)
class LogEntry:
    """``count`` receipts under ``root``; ``previous`` is the hash of the entry before.

    ``index`` counts entries from 0, ``time_ms`` is Unix time in milliseconds.
    """

    index: int
    time_ms: int
    count: int
    root: bytes
    previous: bytes

    @property
    def hash(self) -> bytes:
        """SHA-256(0x02 + previous + index, time_ms and count as u64 LE + root): 32 bytes."""
        numbers = u64(self.index) + u64(self.time_ms) + u64(self.count)
        return hashlib.sha256(_ENTRY + self.previous + numbers + self.root).digest()

    def followed_by(self, digests: Sequence[bytes], time_ms: int) -> "LogEntry":
        """The next entry, over the ``digests`` of one receipt or more."""
        return LogEntry(self.index + 1, time_ms, len(digests), root(digests), self.hash)


@dataclass(frozen=True, slots=True)
class Inclusion:
    """The place of a receipt under an entry's root, and the hashes beside its way there."""

    entry: LogEntry
    index: int
    path: tuple[bytes, ...]


def first_entry(digests: Sequence[bytes], time_ms: int) -> LogEntry:
    return LogEntry(0, time_ms, len(digests), root(digests), FIRST_PREVIOUS)


def inclusions(entry: LogEntry, digests: Sequence[bytes]) -> list[Inclusion]:
    """One for each of the ``digests`` of ``entry``, in their order."""
    found = paths(digests, range(len(digests)))
    return [Inclusion(entry, index, path) for index, path in enumerate(found)]


def require_inclusion(digest: bytes, found: Inclusion) -> None:
    """Raise ProtocolError, naming what is wrong, unless the receipt is in the log's entry."""
    entry = found.entry
    if not opens(entry.root, entry.count, found.index, digest, found.path):
        raise ProtocolError("path", "it does not lead to the root of the log's entry")


def require_chain(entries: Sequence[LogEntry]) -> None:
    """Raise ProtocolError, naming the entry, unless ``entries`` follow each other.

    The first may be any entry of a log; the first of the log itself has no previous one.
    """
    for before, entry in pairwise(entries):
        if entry.index != before.index + 1 or entry.previous != before.hash:
            raise ProtocolError("previous", f"entry {entry.index} does not follow {before.index}")
        if entry.time_ms < before.time_ms:
            raise ProtocolError("time_ms", f"entry {entry.index} is older than the one before")
    if entries and entries[0].index == 0 and entries[0].previous != FIRST_PREVIOUS:
        raise ProtocolError("previous", "the first entry of a log has none")
