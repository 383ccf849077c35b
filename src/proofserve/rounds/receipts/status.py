"""How many receipts a node has made, and how many answers have none."""

from collections.abc import Mapping
from dataclasses import dataclass

# Why an answer has no receipt.
NO_SKETCHES, REPEATED_ID, INVALID = "no_sketches", "repeated_id", "invalid"


@dataclass(frozen=True, slots=True)
class ReceiptGauges:
    """Numbers over the life of the outbox file, but for ``waiting``, which is in memory.

    ``stored`` receipts were stored, ``kept`` of them are not deleted yet. ``without`` counts the
    answers without a receipt, by reason: ``no_sketches`` (the engine lost rows of the answer),
    ``repeated_id`` (an earlier answer with this id has a receipt), ``invalid`` (what the engine
    said about it contradicts itself). ``unlogged`` receipts are stored and not in the log yet;
    ``waiting`` answers are not stored yet.
    """

    stored: int
    kept: int
    log_entries: int
    unlogged: int
    without: Mapping[str, int]
    waiting: int = 0
