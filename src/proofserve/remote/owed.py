"""Why a prover has not proved: the reasons, and the errors of its node as such reasons."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import httpx

from proofserve.reports import NodeError, ReportedError

# What a node may send instead of the fields that it owes.
_NONSENSE: Final = (KeyError, IndexError, AttributeError, TypeError, ValueError, RecursionError)


class Unproved(StrEnum):
    """Why a prover has not proved what it owed. None of these is fraud, and none clears."""

    LATE = "late"
    """The node may serve chat, or a round, or be slow."""
    PARTLY = "partly answered"
    """Other nonces than those asked for, or not all of them."""
    OTHER_BLOCK = "another block"
    """The answer is, by its own words, for another block or key."""
    REFUSED = "refused"
    """An error status: a budget, another model or shape, a wrong key, deleted vectors."""
    UNREACHABLE = "not reached"
    UNREADABLE = "unreadable"
    """The answer is none of a node, or has another shape than what was asked for."""
    OTHER_WEIGHTS = "another digest"
    """The node says itself that it serves another checkpoint."""
    OTHER_KEY = "another key"
    """The answer is not signed by the key that the validator knows to be the node's."""
    OTHER_BITS = "other bits"
    """Most members of its fleet have equal bits, and it has others though it says it is alike."""
    OVERLAPPING = "overlapping roots"
    """A nonce is under two roots of one round."""
    UNDELIVERED = "not delivered"
    """Nonces of its lane below others that came; the source cannot say who lost them."""
    INTERRUPTED = "interrupted"
    """The validator ended before the answer came, or can judge it no more."""


class UnprovedError(ReportedError):
    """A prover owes an answer; ``seconds`` passed until it, or the deadline, if one was sent."""

    def __init__(self, kind: Unproved, text: str, seconds: float | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.seconds = seconds


@dataclass(frozen=True, slots=True)
class Withheld:
    """A part of what a prover owed, which it did not show; ``text`` says what, and why."""

    kind: Unproved
    text: str


def unproved_by(error: NodeError) -> UnprovedError:
    """What the failure of a call to the prover's node means."""
    kind = Unproved.UNREACHABLE if error.status is None else Unproved.REFUSED
    if isinstance(error.__cause__, httpx.ReadTimeout):
        kind = Unproved.LATE
    return UnprovedError(kind, str(error))


@contextmanager
def owed_by(url: str) -> Iterator[None]:
    """What the prover's node at ``url`` must answer: its failures raise UnprovedError."""
    try:
        yield
    except NodeError as error:
        raise unproved_by(error) from error
    except _NONSENSE as error:
        text = f"{url} does not answer as a node: {error!r}"
        raise UnprovedError(Unproved.UNREADABLE, text) from error
