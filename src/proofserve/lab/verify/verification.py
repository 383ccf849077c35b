"""Compares the artifacts of a prover with our own recomputation of a sample of them."""

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

# Vectors by nonce, float32 [k_dim] each, and the function that computes ours.
Vectors = Mapping[int, NDArray[np.float32]]
Recompute = Callable[[Sequence[int]], Vectors]


@dataclass(frozen=True, slots=True)
class VerificationRule:
    """The threshold and the test; a ``sequential`` test stops as soon as it decides.

    A claim further than ``dist_threshold`` (L2) from our vector is a mismatch. ``at_once`` nonces
    are recomputed in one call.
    """

    test: SequentialTest
    dist_threshold: float
    sequential: bool = True
    at_once: int = 8

    @property
    def description(self) -> str:
        test = self.test
        how = "one after the other, until the test decides" if self.sequential else "all at once"
        return (
            f"A claim is a mismatch if it is further than {self.dist_threshold:g} from the"
            f" recomputed vector. An honest node has mismatches in at most {test.p_honest:g} of its"
            f" nonces, a fraud in at least {test.p_fraud:g}. The nonces are judged {how}. An honest"
            f" node is convicted with a chance of at most {test.alpha:g}, a fraud is cleared with"
            f" at most {test.beta:g}."
        )


@dataclass(frozen=True, slots=True)
class Verification:
    """The verdict. ``figure`` is the likelihood ratio of a sequential test, else the p-value."""

    verdict: SequentialResult
    nonces_used: int
    mismatches: tuple[Mismatch, ...]
    figure: float


def draw(nonces: Sequence[int], seed: str, most: int | None = None) -> tuple[int, ...]:
    """The first ``most`` of ``nonces``, in an order that ``seed`` decides.

    The order is that of the SHA-256 of "{seed}|{nonce}", so that all who know the seed draw the
    same. The prover must not know it before it publishes the artifacts.
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
    k_dim = claimed.k_dim or 0
    for start in range(0, len(sample), rule.at_once):
        chunk = sample[start : start + rule.at_once]
        about = [claim for nonce in chunk for claim in claims.get(nonce, ())]
        try:
            compared = compare(chunk, recompute(chunk), about, rule.dist_threshold, k_dim)
        except IncompleteRecomputation as error:
            raise LabError(f"no verdict is possible: {error}") from error
        found = {mismatch.nonce: mismatch for mismatch in compared.mismatches}
        for position, nonce in enumerate(chunk, start + 1):
            progress.advance()
            if nonce in found:
                mismatches.append(found[nonce])
            verdict = rule.test.result(len(mismatches), position)
            if rule.sequential and verdict is not SequentialResult.UNDECIDED:
                return _sequential(rule, verdict, mismatches, position)
    if rule.sequential:
        return _sequential(rule, SequentialResult.UNDECIDED, mismatches, len(sample))
    return _fixed(rule, mismatches, len(sample))


def _sequential(
    rule: VerificationRule, verdict: SequentialResult, mismatches: Sequence[Mismatch], used: int
) -> Verification:
    ratio = math.exp(rule.test.log_ratio(len(mismatches), used))
    return Verification(verdict, used, tuple(mismatches), ratio)


def _fixed(rule: VerificationRule, mismatches: Sequence[Mismatch], used: int) -> Verification:
    test = rule.test
    judged = judge(len(mismatches), used, test.p_honest, test.alpha)
    if judged.fraud_detected:
        verdict = SequentialResult.FRAUD
    elif power(used, test.p_honest, test.alpha, test.p_fraud) >= 1.0 - test.beta:
        verdict = SequentialResult.HONEST
    else:
        # With so few nonces the test would also miss too many frauds.
        verdict = SequentialResult.UNDECIDED
    return Verification(verdict, used, tuple(mismatches), judged.p_value)
