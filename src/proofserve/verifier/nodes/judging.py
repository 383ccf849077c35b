"""The verdict about a node by the vectors of other nodes (``docs/native.md``).

Equal bits with one of them clear. Else two tests decide: whether the node is farther from the
references than these are from each other, and whether its errors lean towards a suspect's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.evidence import Evidence, mixed
from proofserve.protocol.verdict.nearness import (
    CLEARED_WITHIN,
    ENOUGH,
    HALF,
    FarnessBets,
    LeaningBets,
    ReferenceVectors,
)
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.reports import Progress
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.judges import Chances, Figures, Judge, Standing, evidence_text, few
from proofserve.verifier.judging import JudgingOptions, VerdictReport
from proofserve.verifier.nodes.sources import KnownNode, Witnesses
from proofserve.verifier.verification import ExactJudge, Truth, settled, verify

Floats = NDArray[np.float64]
NEARNESS: Final = "nearness"
SUSPECTS: Final = "suspects"
_ONE_KIND: Final = "the references name no two kinds of card"


def judged_by_nodes(
    claimed: ClaimedArtifacts, known: Witnesses, options: JudgingOptions, seed: str
) -> VerdictReport:
    """The verdict, and what was found, as of ``judged``; ``seed`` drew the sample.

    Raises ReportedError for references that are one witness, UnprovedError for another checkpoint
    than theirs, ProtocolError for a number out of range.
    """
    known.require_different()
    for reference in known.references:
        claimed.require_digest(reference.weights_digest)
    cleared = cleared_by_bits(claimed, known, options, seed)
    return cleared or judged_by_distance(claimed, known, options, seed)


def cleared_by_bits(
    claimed: ClaimedArtifacts, known: Witnesses, options: JudgingOptions, seed: str
) -> VerdictReport | None:
    """The verdict if a node has the bits of one of the references; other bits say nothing."""
    for reference in known.references:
        exact = ExactJudge(options.chances(), reference.facts, claimed.ran_on)
        same = _report(claimed, known, reference, [exact], options, seed)
        if same.outcome.verdict is SequentialResult.HONEST:
            return replace(same, origin=f"those whose bits are equal to those of {reference.name}")
    return None


def judged_by_distance(
    claimed: ClaimedArtifacts, known: Witnesses, options: JudgingOptions, seed: str
) -> VerdictReport:
    """The same, whatever the bits are: it trusts no single reference."""
    vectors, chances = _Rows(known), options.chances()
    each = replace(chances, alpha=chances.alpha / (1 + len(known.suspects)))
    judges: list[Judge[ClaimError]] = [NearnessJudge(vectors, each)]
    if known.suspects:
        judges.append(SuspectsJudge(vectors, each))
    return _report(claimed, known, known.references[0], judges, options, seed)


def _report(
    claimed: ClaimedArtifacts,
    known: Witnesses,
    beside: KnownNode,
    judges: Sequence[Judge[ClaimError]],
    options: JudgingOptions,
    seed: str,
) -> VerdictReport:
    """What ``judges`` say of the claims less the vectors of one reference."""
    needed = [judge.needed for judge in judges if isinstance(judge, ExactJudge)]
    sample = known.sample[: min([len(known.sample), *needed])]
    width = len(beside.vectors[sample[0]])
    ours = truth_of(beside, width, len(sample))
    found = verify(claimed, sample, ours, judges, Progress())
    names = few([each.title for each in known.references], len(known.references))
    return VerdictReport(
        settled(found, claimed, ours), claimed, seed, options, names, how="compared"
    )


def truth_of(node: KnownNode, width: int, at_once: int) -> Truth:
    """What a node computed, as what claims are compared with."""
    return Truth(
        lambda nonces: {nonce: node.vectors[nonce] for nonce in nonces},
        width,
        at_once,
        node.weights_digest,
        name=node.name,
        facts=node.facts,
    )


class _Rows:
    """The witnesses' vectors as arrays, by the places of nonces in the sample."""

    def __init__(self, known: Witnesses) -> None:
        self.known = known
        self._places = {nonce: i for i, nonce in enumerate(known.sample)}
        kinds = {each.kind for each in known.references} - {None}
        vectors = np.array([self._of(each) for each in known.references])
        self.references = ReferenceVectors(vectors, len(kinds))
        self.suspects = {each.name: self._of(each) for each in known.suspects}

    def _of(self, node: KnownNode) -> Floats:
        rows: Floats = np.array([node.vectors[n] for n in self.known.sample], dtype=np.float64)
        return rows

    def place(self, nonce: int) -> int:
        return self._places[nonce]

    def theirs(self, error: ClaimError) -> Floats | None:
        """The vector that a node claims, [1, width]; None if it has none."""
        if error.error is None:
            return None
        # An error is the claim less the vector of the first reference.
        ours = self.references.vectors[0, self.place(error.nonce)]
        found: Floats = (ours + error.error.astype(np.float64))[np.newaxis]
        return found


class NearnessJudge(Judge[ClaimError]):
    """Whether a node is as near to the references as these are to each other.

    Two references only differ from each other, so three are needed. It does not clear beside an odd
    one: what is near to that may be a fraud.
    """

    name = NEARNESS

    def __init__(self, rows: _Rows, chances: Chances) -> None:
        self._rows = rows
        self._chances = chances
        self._references = rows.references
        of = rows.references
        self._bets = FarnessBets(of.apart, of.honest_beyond) if of.are_enough else None
        self._odd = rows.references.odd()
        self._convicting, self._against_all, self._against_half = map(Evidence, FarnessBets.COUNTS)
        self._vectors: dict[int, Floats] = {}
        self._farness: list[float] = []

    def add(self, error: ClaimError) -> None:
        self.nonces += 1
        far = np.array([np.inf])
        if (theirs := self._rows.theirs(error)) is not None:
            place = self._rows.place(error.nonce)
            self._vectors[place] = theirs[0]
            far = self._references.farness(theirs, [place])
        self._farness.append(float(far[0]))
        if self._bets is not None:
            self._convicting.add(self._bets.convicting(far)[0])
            self._against_all.add(self._bets.against_all(far)[0])
            self._against_half.add(self._bets.against_half(far)[0])

    @property
    def _log_clearing(self) -> float:
        return min(self._against_all.log, self._against_half.log)

    def standing(self) -> Standing:
        return Standing(
            convicts=self._convicting.peak >= self._chances.convicts_at,
            clears=self._log_clearing >= self._chances.clears_at and self._odd is None,
        )

    def _says(self, standing: Standing) -> tuple[str, Figures]:
        if self._bets is None:
            return f"distances decide nothing beside two references: give {ENOUGH}", {}
        far = float(np.exp(np.median(self._farness) - np.median(self._references.apart, 1).max()))
        figures: dict[str, float | str] = {
            "times_as_far": far,
            "log_evidence": self._convicting.peak,
            "log_clearing": self._log_clearing,
        }
        text = f"{far:.2g} times as far from the references as the farthest of them"
        if self._vectors:
            vectors = np.array([*self._vectors.values()])
            nearest = self._references.nearest(vectors, [*self._vectors])
            figures["kernel"] = self._rows.known.references[nearest].title
            text += f", nearest to {figures['kernel']}"
        if standing.convicts:
            text += f", {evidence_text(self._convicting.peak)}"
        elif standing.clears:
            figures |= {"excluded_share": HALF, "excluded_if": "it is then twice as far away"}
            text += f"; not {CLEARED_WITHIN:g} times as far in all nonces, nor twice in half"
        elif self._references.are_of_one_kind:
            text += f"; no distance convicts, as {_ONE_KIND}"
        else:
            text += f"; an honest node may be {self._references.honest_beyond:g} times as far"
        if self._odd is not None:
            name = self._rows.known.references[self._odd].title
            text += f". {name} is odd among the references, and none is cleared beside it"
        return text, figures


class SuspectsJudge(Judge[ClaimError]):
    """Whether a node's errors lean towards those of a node that cheats on purpose."""

    name = SUSPECTS

    def __init__(self, rows: _Rows, chances: Chances) -> None:
        self._rows = rows
        self._chances = chances
        self._leanings = {
            name: _Leaning(LeaningBets(rows.references, vectors))
            for name, vectors in rows.suspects.items()
        }

    def add(self, error: ClaimError) -> None:
        # A claim without a vector leans nowhere; the test of distances counts it.
        if (theirs := self._rows.theirs(error)) is None:
            return
        self.nonces += 1
        place = [self._rows.place(error.nonce)]
        for name, of in self._leanings.items():
            suspect = self._rows.suspects[name][place]
            of.add(self._rows.references.leaning(theirs, suspect, place), self._chances.share)

    def standing(self) -> Standing:
        needed = self._chances.convicts_at
        convicts = any(of.convicting.peak >= needed for of in self._leanings.values())
        return Standing(convicts=convicts, clears=not self._open)

    @property
    def _open(self) -> list[str]:
        """Suspects that are not ruled out, and could be."""
        return [
            name
            for name, of in self._leanings.items()
            if not of.bets.is_unseen and of.log_clearing < self._chances.clears_at
        ]

    def _says(self, standing: Standing) -> tuple[str, Figures]:
        name = max(self._leanings, key=lambda each: self._leanings[each].convicting.peak)
        of = self._leanings[name]
        figures: Figures = {"log_evidence": of.convicting.peak, "suspect": name}
        text = f"not ruled out: {few(self._open)}"
        if standing.convicts:
            lean, evidence = float(np.mean(of.leaning)), evidence_text(of.convicting.peak)
            text = f"errors lean to {name}: mean cosine {lean:.2f}, {evidence}"
        elif standing.clears:
            text = f"all ruled out on {self._chances.share:.0%} of the nonces"
        elif self._rows.references.are_of_one_kind:
            text += f"; no direction convicts, as {_ONE_KIND}"
        if unseen := [n for n, each in self._leanings.items() if each.bets.is_unseen]:
            text += f"; {few(unseen)} is as near to the references as they are: not tested"
        return text, figures


@dataclass(slots=True)
class _Leaning:
    """One suspect: the evidence for it, and for its innocence, from the cosines so far."""

    bets: LeaningBets
    convicting: Evidence = field(default_factory=lambda: Evidence(LeaningBets.COUNT))
    log_clearing: float = 0.0
    leaning: list[float] = field(default_factory=list)

    def add(self, cosine: Floats, share: float) -> None:
        self.leaning.append(float(cosine[0]))
        self.convicting.add(self.bets.convicting(cosine)[0])
        self.log_clearing -= float(mixed(self.bets.log_ratios(cosine), share)[0])
