"""Compares the artifacts of a prover with our own recomputation of a sample of them."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from proofserve.lab.client.errors import LabError
from proofserve.lab.client.progress import Progress
from proofserve.lab.verify.claimed import ClaimedArtifacts
from proofserve.lab.verify.judges import Finding, Judge, Recompute
from proofserve.protocol.errors import IncompleteRecomputation
from proofserve.protocol.verdict.comparison import Claim, ClaimError, Mismatch, claim_errors
from proofserve.protocol.verdict.sequential import SequentialResult

# The first nonces are judged alone: they rule out most suspects of a bank.
FIRST_CHUNK = 2


@dataclass(frozen=True, slots=True)
class Verification:
    """The verdict, what each test found, and the claims that had no vector."""

    verdict: SequentialResult
    nonces_used: int
    findings: tuple[Finding, ...]
    broken: tuple[Mismatch, ...]


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
    judges: Sequence[Judge],
    at_once: int,
    progress: Progress,
) -> Verification:
    """Judge the claims about ``sample``, recomputed in its order, up to ``at_once`` in one call.

    One test is enough to convict; to clear, all tests that can clear must do so. Raises LabError
    if there is nothing to judge, or our own recomputation is not complete.
    """
    if not sample:
        raise LabError("there is no artifact to verify")
    progress.step(f"recomputing up to {len(sample)} of {len(claimed.nonces)} nonces", len(sample))
    about: defaultdict[int, list[Claim]] = defaultdict(list)
    for claim in claimed.claims:
        about[claim.nonce].append(claim)
    broken: list[Mismatch] = []
    used, size = 0, min(FIRST_CHUNK, at_once)
    while used < len(sample):
        chunk = sample[used : used + size]
        errors = _errors(chunk, recompute, about, claimed.width)
        for judge in judges:
            judge.prepare(errors)
        for error in errors:
            used += 1
            progress.advance()
            if error.broken is not None:
                broken.append(error.broken)
            for judge in judges:
                judge.add(error)
            findings = tuple(judge.finding() for judge in judges)
            verdict = _verdict(judges, findings)
            if verdict is not SequentialResult.UNDECIDED:
                return Verification(verdict, used, findings, tuple(broken))
        size = min(2 * size, at_once)
    return Verification(SequentialResult.UNDECIDED, used, findings, tuple(broken))


def _errors(
    nonces: Sequence[int], recompute: Recompute, about: defaultdict[int, list[Claim]], width: int
) -> tuple[ClaimError, ...]:
    claims = [claim for nonce in nonces for claim in about.get(nonce, ())]
    try:
        return claim_errors(nonces, recompute(nonces), claims, width)
    except IncompleteRecomputation as error:
        raise LabError(f"no verdict is possible: {error}") from error


def _verdict(judges: Sequence[Judge], findings: Sequence[Finding]) -> SequentialResult:
    if any(finding.result is SequentialResult.FRAUD for finding in findings):
        return SequentialResult.FRAUD
    clearing = {f.result for judge, f in zip(judges, findings, strict=True) if judge.clears}
    if clearing == {SequentialResult.HONEST}:
        return SequentialResult.HONEST
    return SequentialResult.UNDECIDED
