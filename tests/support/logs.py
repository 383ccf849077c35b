"""Logs of receipts as nodes make them, and as they post them."""

from collections.abc import Sequence
from typing import Any

from proofserve.protocol.receipts.record import LogEntry, SignedEntry, SigningKey, next_entry
from proofserve.wire.signed import signed_entry_body


def chain(count: int, name: str = "a", before: LogEntry | None = None) -> list[LogEntry]:
    """``count`` entries after ``before``, each over one receipt; ``name`` makes them differ."""
    entries: list[LogEntry] = []
    for number in range(count):
        digests = [f"{name} {number}".encode().ljust(32)]
        time_ms = 1000 * number if before is None else before.time_ms + 1000
        before = next_entry(before, digests, time_ms)
        entries.append(before)
    return entries


def signed_entries(key: SigningKey, entries: Sequence[LogEntry]) -> list[SignedEntry]:
    return [SignedEntry(each, key.sign(each.hash)) for each in entries]


def posted(key: SigningKey, entries: Sequence[LogEntry]) -> dict[str, Any]:
    """The body of ``/logged``."""
    bodies = [signed_entry_body(each) for each in signed_entries(key, entries)]
    return {"public_key": key.public_key.hex(), "entries": bodies}
