"""Compares the artifacts of a prover with our own recomputation of a sample of them."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from proofserve.protocol import ARTIFACT, DEFAULT_SCHEME, SKETCH_2
from proofserve.protocol.codec import encode
from proofserve.protocol.errors import IncompleteRecomputation
from proofserve.protocol.verdict.comparison import (
    Claim,
    ClaimError,
    Mismatch,
    Reason,
    claim_errors,
    mismatch_of,
)
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.reports import Progress, ReportedError
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.judges import (
    Chances,
    Figures,
    Judge,
    KernelBank,
    Opinion,
    Recompute,
    Vectors,
    as_sent,
    result_of,
)

# Nonces are judged in growing groups, because the first ones show which kernel the node has and
# which suspects matter. No node is cleared before 23; from then on a group is a quarter of what was
# judged.
_TOTALS: Final = (2, 9, 23)
# What more nonces do not change.
CERTAIN: Final = frozenset({SequentialResult.HONEST, SequentialResult.FRAUD})
# What an engine says of itself and rounds by, in the words of ``KernelFacts``.
_ROUNDS_BY: Final = ("engine", "processor", "torch", "dtype", "kv_dtype", "attention", "ranks")


@dataclass(frozen=True, slots=True)
class Truth:
    """The vectors of ``width`` values that a validator compares with, ``at_once`` in one call.

    Of a model that ``is_dense`` it is known that it mixes no experts. ``validator`` has other
    vectors of the checkpoint, None if an engine recomputes. An engine has a ``name``, and
    ``facts``: the fields of ``KernelFacts``, None for what it does not say. ``unit`` is what a
    reader calls that of which the vectors are. ``trusted`` are the errors of nodes that count as
    measured honest ones, by name. ``totals`` are those of ``group_size``.
    """

    vectors: Recompute
    width: int
    at_once: int
    weights_digest: str | None = None
    validator: KernelBank | None = None
    is_dense: bool = False
    name: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)
    unit: str = "nonces"
    trusted: Mapping[str, Recompute] = field(default_factory=dict)
    totals: Sequence[int] = _TOTALS

    def errors_of(self, node: Vectors, nonces: Sequence[int]) -> Vectors:
        """Of a node's vectors, float32 [width] each."""
        ours = self.vectors(nonces)
        return {nonce: node[nonce] - as_sent(ours[nonce]) for nonce in nonces}

    @property
    def mixes_experts(self) -> bool:
        """Whether the checkpoint here does; False without one."""
        return self.validator is not None and not self.is_dense


@dataclass(frozen=True, slots=True)
class Verification:
    """The verdict, what each test found, and the error of each nonce that was used."""

    verdict: SequentialResult
    opinions: tuple[Opinion, ...]
    errors: tuple[ClaimError, ...]

    @property
    def nonces_used(self) -> int:
        return len(self.errors)

    def mismatches(self, dist_threshold: float) -> tuple[Mismatch, ...]:
        """The claims without a vector, and those further than the threshold."""
        found = (mismatch_of(error, dist_threshold) for error in self.errors)
        return tuple(each for each in found if each is not None)


def verify(
    claimed: ClaimedArtifacts,
    sample: Sequence[int],
    ours: Truth,
    judges: Sequence[Judge[ClaimError]],
    progress: Progress,
) -> Verification:
    """Judge the claims about ``sample``, recomputed in its order.

    One test is enough to convict; to clear, all tests that can clear must do so. A vector that does
    not fit its root convicts without a test. Raises ReportedError if there is nothing
    to judge, or our own recomputation is not complete.
    """
    faults = claimed.faults
    if not sample and not faults:
        raise ReportedError("there is no artifact to verify")
    if forged := [each for each in faults.values() if each.reason is Reason.NOT_COMMITTED]:
        text = f"{len(forged)} of {len(sample)} opened nonces do not fit the roots"
        opinion = Opinion("roots", SequentialResult.FRAUD, len(sample), text, {})
        broken = tuple(ClaimError(each.nonce, None, each) for each in forged)
        return Verification(SequentialResult.FRAUD, (opinion,), broken)
    what = f"{len(sample)} of {len(claimed.nonces)} {ours.unit}"
    progress.step(f"recomputing up to {what}", len(sample))
    about: defaultdict[int, list[Claim]] = defaultdict(list)
    for claim in claimed.claims:
        about[claim.nonce].append(claim)

    def errors_of(nonces: Sequence[int]) -> tuple[ClaimError, ...]:
        claims = [claim for nonce in nonces for claim in about[nonce]]
        try:
            errors = claim_errors(nonces, ours.vectors(nonces), claims, ours.width)
        except IncompleteRecomputation as error:
            raise ReportedError(f"no verdict is possible: {error}") from error
        # A nonce with a fault has no claim: the fault says more than that the claim is missing.
        return tuple(
            ClaimError(each.nonce, None, faults[each.nonce]) if each.nonce in faults else each
            for each in errors
        )

    return decide(sample, errors_of, ours.at_once, judges, progress, ours.totals)


def decide(
    sample: Sequence[int],
    errors_of: Callable[[Sequence[int]], Sequence[ClaimError]],
    at_once: int,
    judges: Sequence[Judge[ClaimError]],
    progress: Progress,
    totals: Sequence[int] = _TOTALS,
) -> Verification:
    """Judge the nonces of ``sample`` in its order; ``errors_of`` takes up to ``at_once`` of them.

    Ends with the first nonce after which there is a verdict.
    """
    judged: list[ClaimError] = []
    verdict = SequentialResult.UNDECIDED
    while len(judged) < len(sample) and verdict not in CERTAIN:
        group = sample[len(judged) :][: group_size(len(judged), at_once, totals)]
        for judge in judges:
            judge.plan(group)
        errors = errors_of(group)
        for judge in judges:
            judge.prepare(errors)
        for error in errors:
            judged.append(error)
            progress.advance()
            for judge in judges:
                judge.add(error)
            verdict = verdict_of(judges)
            if verdict in CERTAIN:
                break
    opinions = tuple(judge.opinion() for judge in judges)
    return Verification(verdict, opinions, tuple(judged))


def group_size(judged: int, at_once: int, totals: Sequence[int] = _TOTALS) -> int:
    """How many nonces to recompute next, of which all are paid though the first may decide.

    ``totals`` are those that were judged after each of the first groups.
    """
    wanted = next((total - judged for total in totals if total > judged), judged // 4)
    return min(wanted, at_once)


def verdict_of(judges: Sequence[Judge[Any]]) -> SequentialResult:
    """The verdict so far."""
    results = [judge.result() for judge in judges]
    for deciding in (SequentialResult.FRAUD, SequentialResult.UNEXPLAINED):
        if deciding in results:
            return deciding
    clearing = {of for judge, of in zip(judges, results, strict=True) if judge.clears}
    return result_of(clears=clearing == {SequentialResult.HONEST})


class ExactJudge(Judge[ClaimError]):
    """Counts the claims that are the vector of an engine that we trust, float16 by float16.

    If all are, they clear the node: whatever computed them, the published weights would have given
    the same. One that differs says nothing, because honest engines differ, and ends the test: what
    the node did in the other nonces is then unknown. So it neither convicts nor refutes.
    """

    name = "exact"

    def __init__(
        self, chances: Chances, ours: Mapping[str, object], theirs: Mapping[str, object] | None
    ) -> None:
        self.needed = nonces_needed(chances)
        self._share = chances.share
        self._facts = ours, theirs
        self._equal = self._without = 0

    def add(self, error: ClaimError) -> None:
        self.nonces += 1
        self._without += error.error is None
        self._equal += error.error is not None and not error.error.any()

    def result(self) -> SequentialResult:
        return result_of(clears=self._equal == self.nonces and self._equal >= self.needed)

    def _says(self, result: SequentialResult) -> tuple[str, Figures]:
        equal, without = self._equal, self._without
        other = self.nonces - equal - without
        figures: dict[str, float] = {"equal": equal, "other_bits": other, "no_vector": without}
        if result is SequentialResult.HONEST:
            figures["excluded_share"] = self._share
        of, parts = f"of {self.nonces} nonces", []
        if other:
            differ = f"the engines differ{self._differences()}"
            parts.append(f"other bits in {other} {of}: {differ}")
        if without:
            parts.append(f"no vector in {without} {of}")
        few = "" if equal >= self.needed else f", {self.needed} are needed"
        return ", and ".join(parts) or f"equal bits in {equal} {of}{few}", figures

    def _differences(self) -> str:
        """In what, by what both say of themselves."""
        ours, theirs = self._facts
        if theirs is None:
            return ""
        found = [
            f"{name} {there} there, {here} here"
            for name in _ROUNDS_BY
            if None not in {there := theirs.get(name), here := ours.get(name)} and there != here
        ]
        return f" ({'; '.join(found)})" if found else ", and say the same of themselves"


def nonces_needed(chances: Chances) -> int:
    """After so many equal ones, a node that forges the share is cleared with beta at most.

    A sample of n nonces has none of those with a chance of (1 - share)^n.
    """
    if chances.share == 1.0:
        return 1
    return math.ceil(chances.clears_at / -math.log1p(-chances.share))


def leaves_open(exact: Verification) -> bool:
    """Whether other tests have to judge: the engines differ, or a vector is missing.

    If all bits agree in too few nonces, the others would judge the trusted engine.
    """
    opinion = next((each for each in exact.opinions if each.test == ExactJudge.name), None)
    if opinion is None or opinion.result is not SequentialResult.UNDECIDED:
        return False
    return opinion.figures["equal"] != opinion.nonces


def claims_of_vectors(vectors: Vectors) -> list[Claim]:
    """The artifacts of a node that has these vectors."""
    texts = encode(np.stack(list(vectors.values())))
    return [Claim(nonce, text) for nonce, text in zip(vectors, texts, strict=True)]


def settled(found: Verification, claimed: ClaimedArtifacts, ours: Truth) -> Verification:
    """The verdict, in view of what the prover owed and of who chose its nonces and its experts.

    Fraud stands. Who withheld a part is not cleared by the rest. Inputs that depend on 32 bits are
    those of other blocks and keys too: a prover that chooses its nonces can answer from a store.
    Where a router chooses, a token near a tie changes its expert in all runs alike, and weights in
    8 bits keep half of a footprint.
    """
    if found.verdict is SequentialResult.FRAUD:
        return found
    used, scheme = found.nonces_used, claimed.scheme or DEFAULT_SCHEME
    by_footprint = any(each.test == "footprint" for each in found.opinions)
    if (withheld := claimed.withheld) is not None:
        figures, text = {"reason": withheld.kind}, f"{withheld.kind}: {withheld.text}"
        opinion = Opinion("unproved", SequentialResult.UNPROVED, used, text, figures)
    elif found.verdict is not SequentialResult.HONEST:
        return found
    elif claimed.unknown_lane is not None and scheme == ARTIFACT:
        text = f"{ARTIFACT} is cleared only where the lane is known: {claimed.unknown_lane}"
        opinion = Opinion("lane", SequentialResult.UNDECIDED, used, text, {})
    elif ours.mixes_experts and scheme != SKETCH_2 and by_footprint:
        text = f"{scheme} lets a mixture choose its experts, so only a round with {SKETCH_2} clears"
        opinion = Opinion("experts", SequentialResult.UNDECIDED, used, text, {})
    else:
        return found
    return replace(found, verdict=opinion.result, opinions=(*found.opinions, opinion))
