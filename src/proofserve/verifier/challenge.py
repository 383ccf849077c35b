"""A challenge: nonces of a block that did not exist a moment ago, and a node's answer to them."""

import secrets
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from proofserve.lab.node_client import NodeClient
from proofserve.lab.records import Work
from proofserve.lab.report import LabError, NodeError, TooSlowError
from proofserve.protocol.nonces import MAX_NONCE
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.rounds.records import Workload
from proofserve.verifier.claims import (
    ClaimedArtifacts,
    Selection,
    WorkOptions,
    document,
    from_answer,
    workload,
)
from proofserve.verifier.judging import VerdictReport

# Results that are kept whole; all are counted.
KEPT: Final = 1000
_KEY: Final = "proofserve challenge"
# What a node may send instead of the fields of its description.
_NONSENSE: Final = (KeyError, IndexError, TypeError, ValueError, RecursionError)


class Unanswered(StrEnum):
    """Why a challenge has no answer that can be judged. None of them is fraud."""

    LATE = "late"
    """The node may serve chat, or a round, or be slow."""
    PARTLY = "partly answered"
    """Other nonces than those asked for, or not all of them."""
    OTHER_BLOCK = "another block"
    """The answer is, by its own words, for another block or key."""
    REFUSED = "refused"
    """An error status: a budget, another model or shape, a wrong key."""
    UNREACHABLE = "not reached"
    UNREADABLE = "unreadable"
    """The answer is none of a node, or has another shape than what was asked for."""
    OTHER_WEIGHTS = "other weights"
    """The node says itself that it serves another checkpoint."""


ChallengeOutcome = SequentialResult | Unanswered


class NoAnswer(LabError):
    def __init__(self, kind: Unanswered, text: str, seconds: float | None = None) -> None:
        super().__init__(text)
        self.kind = kind
        self.seconds = seconds


@dataclass(frozen=True, slots=True)
class FreshChallenge:
    """Random ``nonces`` of the random block of ``work``: no node can have computed them before."""

    work: Work
    nonces: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChallengeAnswer:
    """What a node claims about a challenge, and after how many seconds."""

    claimed: ClaimedArtifacts
    work: Workload
    seconds: float


def fresh(shape: Work, count: int) -> FreshChallenge:
    """A challenge of ``count`` nonces, with scheme and lengths of ``shape``."""
    nonces: set[int] = set()
    while len(nonces) < count:
        nonces.add(secrets.randbelow(MAX_NONCE + 1))
    work = replace(shape, block_hash=secrets.token_hex(32), public_key=_KEY)
    return FreshChallenge(work, tuple(nonces))


def answer(node: NodeClient, challenge: FreshChallenge, deadline_s: float) -> ChallengeAnswer:
    """Have ``node`` compute ``challenge``, under the first name of its model.

    Raises NoAnswer unless the answer is whole, about what was asked, and in time.
    """
    try:
        model, digest = str(node.models()[0]), node.weights_digest()
    except NodeError as error:
        raise _no_answer(error) from error
    except _NONSENSE as error:
        text = f"{node.url} does not say which model it serves"
        raise NoAnswer(Unanswered.UNREADABLE, text) from error
    began = time.monotonic()
    work = replace(challenge.work, model=model)
    try:
        content = node.answer_within(work, challenge.nonces, deadline_s)
    except TooSlowError as error:
        text = f"{error}{_if_a_round_runs(node)}"
        raise NoAnswer(Unanswered.LATE, text, time.monotonic() - began) from error
    except NodeError as error:
        raise _no_answer(error) from error
    seconds = time.monotonic() - began
    try:
        claimed = from_answer(content, node.url)
    except LabError as error:
        raise NoAnswer(Unanswered.UNREADABLE, str(error), seconds) from error
    return _checked(replace(claimed, weights_digest=digest), challenge, node.url, seconds)


def _no_answer(error: NodeError) -> NoAnswer:
    kind = Unanswered.UNREACHABLE if error.status is None else Unanswered.REFUSED
    return NoAnswer(kind, str(error))


def _if_a_round_runs(node: NodeClient) -> str:
    try:
        generating = node.status().state == "GENERATING"
    except (NodeError, *_NONSENSE):
        return ""
    said = "; it says that a round runs, and a challenge waits for its end"
    return said if generating else ""


def _checked(
    claimed: ClaimedArtifacts, challenge: FreshChallenge, source: str, seconds: float
) -> ChallengeAnswer:
    """The answer, if it is about what was asked. Its vectors are not looked at here."""
    asked = challenge.work
    try:
        Selection(asked.block_hash, asked.public_key).require(
            "the answer", claimed.block_hash, claimed.public_key
        )
    except LabError as error:
        raise NoAnswer(Unanswered.OTHER_BLOCK, str(error), seconds) from error
    answered = [claim.nonce for claim in claimed.claims]
    if sorted(answered) != sorted(challenge.nonces):
        missing = len({*challenge.nonces}.difference(answered))
        text = f"{missing} of {len(challenge.nonces)} nonces have none"
        raise NoAnswer(Unanswered.PARTLY, f"{len(answered)} vectors came; {text}", seconds)
    whole = replace(claimed, nonces=challenge.nonces, seq_len=asked.seq_len, scheme=asked.scheme)
    given = WorkOptions(
        asked.scheme, asked.k_dim, asked.seq_len, asked.block_height, asked.stronger_rng
    )
    try:
        return ChallengeAnswer(whole, workload(whole, given), seconds)
    except LabError as error:
        raise NoAnswer(Unanswered.UNREADABLE, f"{source}: {error}", seconds) from error


@dataclass(frozen=True, slots=True)
class ChallengeResult:
    """What came of a challenge: a verdict with its ``report``, or why there is none.

    ``seconds`` passed until the answer, or the deadline; None if nothing was sent.
    """

    outcome: ChallengeOutcome
    challenge: FreshChallenge
    reason: str
    seconds: float | None = None
    answered: ChallengeAnswer | None = None
    report: VerdictReport | None = None
    at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def line(self) -> str:
        took = "" if self.seconds is None else f"{self.seconds:.1f} s, "
        return f"{self.at:%Y-%m-%d %H:%M:%S}  {self.outcome}: {took}{self.reason}"

    def record(self) -> dict[str, object]:
        """``answer`` is in the form that ``verify`` reads, for a verdict that is not honest."""
        kept = self.answered if self.outcome is not SequentialResult.HONEST else None
        return {
            "at": self.at.isoformat(timespec="seconds"),
            "outcome": self.outcome,
            "reason": self.reason,
            "seconds": self.seconds,
            "block_hash": self.challenge.work.block_hash,
            "nonces": len(self.challenge.nonces),
            "report": self.report.record() if self.report else None,
            "answer": document(kept.work, kept.claimed.claims) if kept else None,
        }


@dataclass(slots=True)
class Tally:
    """The results of repeated challenges of one node."""

    url: str
    counts: Counter[ChallengeOutcome] = field(default_factory=Counter)
    newest: deque[ChallengeResult] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, result: ChallengeResult) -> None:
        self.counts[result.outcome] += 1
        self.newest.append(result)

    @property
    def text(self) -> str:
        total = self.counts.total()
        said = ", ".join(f"{count} {outcome}" for outcome, count in self.counts.most_common())
        return f"{total} challenge{'' if total == 1 else 's'}: {said}"

    def record(self) -> Mapping[str, Any]:
        every = (*SequentialResult, *Unanswered)
        return {
            "url": self.url,
            "counts": {outcome: self.counts[outcome] for outcome in every},
            "challenges": [each.record() for each in self.newest],
        }
