"""A challenge: nonces of a block that did not exist a moment ago, and a node's answer to them."""

import hashlib
import math
import secrets
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final

from typing_extensions import TypedDict

from proofserve.protocol.nonces import MAX_NONCE
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.node_client import NodeClient, Unproved, UnprovedError, owed_by, unproved_by
from proofserve.remote.records import Work
from proofserve.reports import NodeError, ReportedError, TooSlowError
from proofserve.verifier.claims import (
    ClaimedArtifacts,
    Selection,
    document,
    from_answer,
    kernel_facts,
)
from proofserve.verifier.judging import VerdictRecord, VerdictReport
from proofserve.verifier.orders import order_of

# Results that are kept whole; all are counted.
KEPT: Final = 1000
DAY_S: Final = 86_400.0
# How long each call may take in which the node says what it serves, beside the deadline.
DESCRIBES_ITSELF_S: Final = 30.0
_KEY: Final = "proofserve challenge"


@dataclass(frozen=True, slots=True)
class FreshChallenge:
    """The ``nonces`` of the random block of ``work``: no node can have computed them before."""

    work: Work
    nonces: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChallengeAnswer:
    """What a node claims about a challenge, and after how many seconds."""

    claimed: ClaimedArtifacts
    order: Work
    seconds: float


def fresh(shape: Work, count: int) -> FreshChallenge:
    """A challenge of ``count`` nonces, with scheme and lengths of ``shape``."""
    work = replace(shape, block_hash=secrets.token_hex(32), public_key=_KEY)
    return FreshChallenge(work, nonces_of(work.block_hash, count))


def nonces_of(block_hash: str, count: int) -> tuple[int, ...]:
    """Those of a challenge, which its block decides.

    A validator that could choose them would take those in which honest kernels err most.
    """
    found, number = dict[int, None](), 0
    while len(found) < count:
        drawn = hashlib.sha256(f"{_KEY}|{block_hash}|{number}".encode()).digest()
        found[int.from_bytes(drawn[:8]) % (MAX_NONCE + 1)] = None
        number += 1
    return tuple(found)


def answer(node: NodeClient, challenge: FreshChallenge, deadline_s: float) -> ChallengeAnswer:
    """Have ``node`` compute ``challenge``, under the first name of its model.

    Raises UnprovedError unless the answer is whole, about what was asked, and in time.
    """
    with owed_by(node.url):
        model, digest = str(node.models()[0]), node.weights_digest()
        ran_on = kernel_facts(node.url, node.kernels())
    began = time.monotonic()
    work = replace(challenge.work, model=model)
    try:
        content = node.answer_within(work, challenge.nonces, deadline_s)
    except TooSlowError as error:
        text = f"{error}{_if_a_round_runs(node)}"
        raise UnprovedError(Unproved.LATE, text, time.monotonic() - began) from error
    except NodeError as error:
        raise unproved_by(error) from error
    seconds = time.monotonic() - began
    try:
        claimed = from_answer(content, node.url)
    except ReportedError as error:
        raise UnprovedError(Unproved.UNREADABLE, str(error), seconds) from error
    claimed = replace(claimed, weights_digest=digest, ran_on=ran_on)
    return _checked(claimed, challenge, node.url, seconds)


def _if_a_round_runs(node: NodeClient) -> str:
    try:
        with owed_by(node.url):
            generating = node.describe()["status"] == "GENERATING"
    except UnprovedError:
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
    except ReportedError as error:
        raise UnprovedError(Unproved.OTHER_BLOCK, str(error), seconds) from error
    answered = [claim.nonce for claim in claimed.claims]
    if sorted(answered) != sorted(challenge.nonces):
        missing = len({*challenge.nonces}.difference(answered))
        text = f"{missing} of {len(challenge.nonces)} nonces have none"
        raise UnprovedError(Unproved.PARTLY, f"{len(answered)} vectors came; {text}", seconds)
    whole = replace(
        claimed,
        nonces=challenge.nonces,
        seq_len=asked.seq_len,
        scheme=asked.scheme,
        unknown_lane=None,
    )
    try:
        return ChallengeAnswer(whole, order_of(whole, asked), seconds)
    except ReportedError as error:
        raise UnprovedError(Unproved.UNREADABLE, f"{source}: {error}", seconds) from error


class ChallengeRecord(TypedDict):
    """``ChallengeResult`` as JSON."""

    at: str
    outcome: SequentialResult
    kind: Unproved | None
    reason: str
    seconds: float | None
    block_hash: str
    nonces: int
    report: VerdictRecord | None
    answer: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class ChallengeResult:
    """What came of a challenge: a verdict with its ``report``, or unproved, and why: ``kind``.

    ``seconds`` passed until the answer, or the deadline; None if nothing was sent.
    """

    outcome: SequentialResult
    challenge: FreshChallenge
    reason: str
    seconds: float | None = None
    answered: ChallengeAnswer | None = None
    report: VerdictReport | None = None
    kind: Unproved | None = None
    at: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def line(self) -> str:
        took = "" if self.seconds is None else f"{self.seconds:.1f} s, "
        why = f" ({self.kind})" if self.kind else ""
        return f"{self.at:%Y-%m-%d %H:%M:%S}  {self.outcome}{why}: {took}{self.reason}"

    def record(self) -> ChallengeRecord:
        """``answer`` is in the form that ``verify`` reads, for a verdict that is not honest."""
        kept = self.answered if self.outcome is not SequentialResult.HONEST else None
        return {
            "at": self.at.isoformat(timespec="seconds"),
            "outcome": self.outcome,
            "kind": self.kind,
            "reason": self.reason,
            "seconds": self.seconds,
            "block_hash": self.challenge.work.block_hash,
            "nonces": len(self.challenge.nonces),
            "report": self.report.record() if self.report else None,
            "answer": document(kept.order, kept.claimed.claims) if kept else None,
        }


class TallyRecord(TypedDict):
    """What ``challenge --json`` writes: ``Tally`` as JSON."""

    url: str
    counts: dict[SequentialResult, int]
    unproved: dict[Unproved, int]
    alpha_left_today: str | None
    challenges: list[ChallengeRecord]


@dataclass(slots=True)
class Tally:
    """The results of challenges of one node, ``every_s`` seconds, or of one if that is None.

    ``alpha`` is the chance that the verdicts of any 24 hours convict an honest node, all together.
    """

    url: str
    alpha: float
    every_s: float | None = None
    counts: Counter[SequentialResult] = field(default_factory=Counter)
    unproved: Counter[Unproved] = field(default_factory=Counter)
    newest: deque[ChallengeResult] = field(default_factory=lambda: deque(maxlen=KEPT))
    _judged_at: deque[float] = field(default_factory=deque)

    def add(self, result: ChallengeResult, now: float) -> None:
        """Count what came of a challenge that ended at ``now``, in monotonic seconds."""
        self.counts[result.outcome] += 1
        if result.kind is not None:
            self.unproved[result.kind] += 1
        if result.report is not None:
            self._judged_at.append(now)
        while self._judged_at and self._judged_at[0] <= now - DAY_S:
            self._judged_at.popleft()
        self.newest.append(result)

    @property
    def alpha_of_one(self) -> float:
        """That of each verdict: all have an equal part."""
        if self.every_s is None:
            return self.alpha
        # A verdict may come late and the next one soon: one more than begin within 24 hours.
        return self.alpha / (math.floor(DAY_S / self.every_s) + 2)

    @property
    def alpha_left(self) -> str:
        """What the verdicts of the last 24 hours have left; empty for a single challenge."""
        if self.every_s is None:
            return ""
        left = self.alpha - len(self._judged_at) * self.alpha_of_one
        return f"{left:.3g} of {self.alpha:g} left of alpha today"

    @property
    def text(self) -> str:
        total = self.counts.total()
        said = ", ".join(f"{count} {outcome}" for outcome, count in self.counts.most_common())
        why = ", ".join(f"{count} {kind}" for kind, count in self.unproved.most_common())
        left = f"; {self.alpha_left}" if self.alpha_left else ""
        kinds = f" ({why})" if why else ""
        return f"{total} challenge{'' if total == 1 else 's'}: {said}{kinds}{left}"

    def record(self) -> TallyRecord:
        return {
            "url": self.url,
            "counts": {outcome: self.counts[outcome] for outcome in SequentialResult},
            "unproved": {kind: self.unproved[kind] for kind in Unproved},
            "alpha_left_today": self.alpha_left or None,
            "challenges": [each.record() for each in self.newest],
        }
