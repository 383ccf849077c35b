"""What is wrong with a chat and its receipts: what convicts, and what only shows nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

# Of all answers, with a gap: beyond it no node is cleared.
MOST_GAPS = 0.05


@dataclass
class FailedCheck(Exception):
    """A statement of a receipt does not hold; ``text`` says what does not fit, for a reader."""

    check: str
    text: str


class GapKind(StrEnum):
    """Why an answer shows nothing."""

    MISSING = "missing"
    # The client's side did not see the receipt, or a root over it, soon after the answer.
    LATE = "late"
    # It ends where neither the model nor the request ended it.
    CUT = "cut"
    # The receipt is of an adapter or of weights that the client did not ask for.
    OTHER = "other weights"
    UNCHECKED = "not checked"


@dataclass
class Gap(Exception):
    """An answer that shows nothing, or its receipt; ``text`` says why, for a reader."""

    kind: GapKind
    text: str


def leave_open(gaps: Mapping[GapKind, int], choices: int, most: float) -> str:
    """Why the ``gaps`` of so many ``choices`` keep a node from being cleared; empty if not."""
    named = ", ".join(f"{count} {kind}" for kind, count in sorted(gaps.items()) if count)
    if gaps.get(GapKind.OTHER):
        return f"{named}, of {choices} answers: receipts are of weights that were not asked for"
    share = sum(gaps.values()) / max(1, choices)
    return f"{named}, of {choices} answers: {share:.0%}, more than {most:.0%}" * (share > most)
