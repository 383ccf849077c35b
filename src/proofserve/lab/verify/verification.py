"""Somebody else's artifacts against our own recomputation of a sample of them."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proofserve.lab.client.errors import LabError
from proofserve.lab.client.progress import Progress
from proofserve.lab.verify.claimed import ClaimedArtifacts
from proofserve.protocol.comparison import Claim, Mismatch, compare
from proofserve.protocol.errors import IncompleteRecomputation
from proofserve.protocol.sequential import SequentialResult, SequentialTest
from proofserve.protocol.statistics import judge, power

# Vectors by nonce, float32 [k_dim] each, and how to get our own.
Vectors = Mapping[int, NDArray[np.float32]]
Recompute = Callable[[Sequence[int]], Vectors]


@dataclass(frozen=True, slots=True)
class VerificationRule:
    """When a claim stands, and the test; ``sequential`` stops as soon as it knows.

    A claim stands within ``dist_threshold`` of our vector, L2. ``at_once`` nonces are recomputed
    in one go.
    """

    test: SequentialTest
    dist_threshold: float
    sequential: bool = True
    at_once: int = 8

    @property
    def words(self) -> str:
        """The rule, for those who read the verdict."""
        test = self.test
        kind = "one nonce after the other, until it is known" if self.sequential else "all together"
        return (
            f"A claim stands within {self.dist_threshold:g} of the recomputed vector; an honest"
            f" node misses that at most {test.p_honest:g} of the time, a fraud at least"
            f" {test.p_fraud:g}. Judged {kind}: an honest node is convicted with a chance of at"
            f" most {test.alpha:g}, a fraud cleared with at most {test.beta:g}."
        )


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome. ``figure`` is the likelihood ratio of a sequential test, else the p-value."""

    finding: SequentialResult
    nonces_used: int
    mismatches: tuple[Mismatch, ...]
    figure: float


def draw(nonces: Sequence[int], seed: str, most: int | None = None) -> tuple[int, ...]:
    """``nonces`` in an order that ``seed`` decides, the first ``most`` of them.

    By the SHA-256 of "{seed}|{nonce}", so that everybody who knows the seed draws the same. It must
    not be known before the artifacts are.
    """

    def rank(nonce: int) -> bytes:
        return hashlib.sha256(f"{seed}|{nonce}".encode()).digest()

    return tuple(sorted(nonces, key=rank)[:most])


def verify(
    claimed: ClaimedArtifacts,
    sample: Sequence[int],
    recompute: Recompute,
    rule: VerificationRule,
    progress: Progress,
) -> Verification:
    """Judge the claims about ``sample``, recomputed in its order.

    Raises LabError if there is nothing to judge, or our own recomputation is not complete.
    """
    if not sample:
        raise LabError("there is no artifact to verify")
    progress.step(f"recomputing up to {len(sample)} of {len(claimed.nonces)} nonces", len(sample))
    claims: defaultdict[int, list[Claim]] = defaultdict(list)
    for claim in claimed.claims:
        claims[claim.nonce].append(claim)
    mismatches: list[Mismatch] = []
    for start in range(0, len(sample), rule.at_once):
        chunk = sample[start : start + rule.at_once]
        found = _compared(chunk, claims, recompute, rule, claimed.k_dim or 0)
        for position, nonce in enumerate(chunk, start + 1):
            progress.advance()
            if nonce in found:
                mismatches.append(found[nonce])
            finding = rule.test.finding(len(mismatches), position)
            if rule.sequential and finding is not SequentialResult.UNDECIDED:
                return _sequential(rule, finding, mismatches, position)
    if rule.sequential:
        return _sequential(rule, SequentialResult.UNDECIDED, mismatches, len(sample))
    return _fixed(rule, mismatches, len(sample))


def _compared(
    chunk: Sequence[int],
    claims: Mapping[int, list[Claim]],
    recompute: Recompute,
    rule: VerificationRule,
    k_dim: int,
) -> dict[int, Mismatch]:
    about = [claim for nonce in chunk for claim in claims.get(nonce, ())]
    try:
        found = compare(chunk, recompute(chunk), about, rule.dist_threshold, k_dim)
    except IncompleteRecomputation as error:
        raise LabError(f"no verdict is possible: {error}") from error
    return {mismatch.nonce: mismatch for mismatch in found.mismatches}


def _sequential(
    rule: VerificationRule, finding: SequentialResult, mismatches: Sequence[Mismatch], used: int
) -> Verification:
    ratio = math.exp(rule.test.log_ratio(len(mismatches), used))
    return Verification(finding, used, tuple(mismatches), ratio)


def _fixed(rule: VerificationRule, mismatches: Sequence[Mismatch], used: int) -> Verification:
    test = rule.test
    verdict = judge(len(mismatches), used, test.p_honest, test.alpha)
    if verdict.fraud_detected:
        finding = SequentialResult.FRAUD
    elif power(used, test.p_honest, test.alpha, test.p_fraud) >= 1.0 - test.beta:
        finding = SequentialResult.HONEST
    else:
        # So few nonces would not have convicted a fraud either.
        finding = SequentialResult.UNDECIDED
    return Verification(finding, used, tuple(mismatches), verdict.p_value)
