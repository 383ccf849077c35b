"""The verdict about a node by the vectors of other nodes, or beside a checkpoint and such nodes.

Without weights (``docs/native.md``) equal bits with one of them clear. Else two tests decide:
whether the node is farther from the references than these are from each other, and whether its
errors lean towards a suspect's.

Beside a checkpoint, on the very nonces, the errors of trusted nodes are those of measured honest
kernels: they clear a node that has their footprint, or their bits, and explain errors that would
convict it. The checkpoint says what they are: it judges each of them first, and one that it
convicts is left out.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from proofserve.protocol.verdict.comparison import ClaimError
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.protocol.verdict.evidence import log_path, mixed
from proofserve.protocol.verdict.nearness import (
    CLEARED_WITHIN,
    ENOUGH,
    HALF,
    FarnessBets,
    LeaningBets,
    ReferenceVectors,
)
from proofserve.remote.records import Work
from proofserve.reports import Progress, ReportedError
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.judges import (
    BankRun,
    Chances,
    Figures,
    Judge,
    Opinion,
    evidence_text,
    few,
    result_of,
)
from proofserve.verifier.judging import JudgingOptions, VerdictReport, judged
from proofserve.verifier.nodes.sources import (
    NONCES,
    KnownNode,
    NodeSource,
    WitnessError,
    Witnesses,
    witnesses_of,
)
from proofserve.verifier.verification import ExactJudge, Truth, claims_of_vectors, settled, verify

Floats = NDArray[np.float64]
_ONE_KIND: Final = "the references name no two kinds of card"
# Nonces by which the checkpoint judges a reference: weights that are rounded in three tenths of
# them are convicted after 17 to 27, honest nodes whose kernel is emulated cleared after 23 to 35.
_VETTED: Final = 35
# Emulated kernels err up to 1.5 times as far as our own run. What errs so much farther, by the
# median of a few nonces, serves other weights, also where no suspect has them.
_TOO_FAR: Final = 4.0
_MEASURED_ON: Final = 3


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
    ours = truth_of(beside, sample)
    outcome = settled(verify(claimed, sample, ours, judges, Progress()), claimed, ours)
    names = ", ".join(each.title for each in known.references)
    return VerdictReport(outcome, claimed, seed, options, names, how="compared")


def truth_of(node: KnownNode, sample: Sequence[int]) -> Truth:
    """What a node computed of ``sample``, as what claims are compared with."""
    return Truth(
        lambda nonces: {nonce: node.vectors[nonce] for nonce in nonces},
        *(len(node.vectors[sample[0]]), len(sample), node.weights_digest),
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

    def claimed(self, error: ClaimError) -> tuple[int, Floats] | None:
        """The place of a nonce, and the vector that a node claims, [width]; None without one."""
        if error.error is None:
            return None
        place = self._places[error.nonce]
        # An error is the claim less the vector of the first reference.
        return place, self.references.vectors[0, place] + error.error.astype(np.float64)


class NearnessJudge(Judge[ClaimError]):
    """Whether a node is as near to the references as these are to each other.

    Two references only differ from each other, so three are needed. It does not clear beside an odd
    one: what is near to that may be a fraud.
    """

    name = "nearness"

    def __init__(self, rows: _Rows, chances: Chances) -> None:
        self._rows = rows
        self._chances = chances
        self._references = of = rows.references
        self._bets = FarnessBets(of.apart, of.honest_beyond) if of.are_enough else None
        self._odd = of.odd()
        self._vectors: dict[int, Floats] = {}
        # Infinite without a vector.
        self._farness: list[float] = []

    def add(self, error: ClaimError) -> None:
        self.nonces += 1
        far = np.array([np.inf])
        if (claimed := self._rows.claimed(error)) is not None:
            place, theirs = claimed
            self._vectors[place] = theirs
            far = self._references.farness(theirs[np.newaxis], [place])
        self._farness.append(float(far[0]))

    @property
    def _log_evidence(self) -> float:
        if self._bets is None:
            return 0.0
        return float(log_path(self._bets.convicting(np.array(self._farness))).max())

    @property
    def _log_clearing(self) -> float:
        if self._bets is None:
            return 0.0
        far = np.array(self._farness)
        against = self._bets.against_all(far), self._bets.against_half(far)
        return float(min(log_path(each)[-1] for each in against))

    def result(self) -> SequentialResult:
        return result_of(
            convicts=self._log_evidence >= self._chances.convicts_at,
            clears=self._log_clearing >= self._chances.clears_at and self._odd is None,
        )

    def _says(self, result: SequentialResult) -> tuple[str, Figures]:
        if self._bets is None:
            return f"distances decide nothing beside two references: give {ENOUGH}", {}
        far = float(np.exp(np.median(self._farness) - np.median(self._references.apart, 1).max()))
        figures: dict[str, float | str] = {
            "times_as_far": far,
            "log_evidence": self._log_evidence,
            "log_clearing": self._log_clearing,
        }
        text = f"{far:.2g} times as far from the references as the farthest of them"
        if self._vectors:
            vectors = np.array([*self._vectors.values()])
            nearest = self._references.nearest(vectors, [*self._vectors])
            figures["kernel"] = self._rows.known.references[nearest].title
            text += f", nearest to {figures['kernel']}"
        if result is SequentialResult.FRAUD:
            text += f", {evidence_text(self._log_evidence)}"
        elif result is SequentialResult.HONEST:
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

    name = "suspects"

    def __init__(self, rows: _Rows, chances: Chances) -> None:
        self._rows = rows
        self._chances = chances
        self._bets = {
            name: LeaningBets(rows.references, vectors) for name, vectors in rows.suspects.items()
        }
        # How much each error leans towards each suspect: cosines.
        self._leaning: dict[str, list[float]] = {name: [] for name in self._bets}

    def add(self, error: ClaimError) -> None:
        # A claim without a vector leans nowhere; the test of distances counts it.
        if (claimed := self._rows.claimed(error)) is None:
            return
        self.nonces += 1
        place, theirs = [claimed[0]], claimed[1][np.newaxis]
        for name, vectors in self._rows.suspects.items():
            cosine = self._rows.references.leaning(theirs, vectors[place], place)
            self._leaning[name].append(float(cosine[0]))

    def _log_evidence(self, name: str) -> float:
        return float(log_path(self._bets[name].convicting(np.array(self._leaning[name]))).max())

    def _log_clearing(self, name: str) -> float:
        log_ratios = self._bets[name].log_ratios(np.array(self._leaning[name]))
        return -float(mixed(log_ratios, self._chances.share).sum())

    def result(self) -> SequentialResult:
        needed = self._chances.convicts_at
        convicts = any(self._log_evidence(name) >= needed for name in self._bets)
        return result_of(convicts=convicts, clears=not self._open)

    @property
    def _open(self) -> list[str]:
        """Suspects that are not ruled out, and could be."""
        return [
            name
            for name, bets in self._bets.items()
            if not bets.is_unseen and self._log_clearing(name) < self._chances.clears_at
        ]

    def _says(self, result: SequentialResult) -> tuple[str, Figures]:
        name = max(self._bets, key=self._log_evidence)
        log_evidence = self._log_evidence(name)
        figures: Figures = {"log_evidence": log_evidence, "suspect": name}
        text = f"not ruled out: {few(self._open)}"
        if result is SequentialResult.FRAUD:
            lean = float(np.mean(self._leaning[name]))
            text = f"errors lean to {name}: mean cosine {lean:.2f}, {evidence_text(log_evidence)}"
        elif result is SequentialResult.HONEST:
            text = f"all ruled out on {self._chances.share:.0%} of the nonces"
        elif self._rows.references.are_of_one_kind:
            text += f"; no direction convicts, as {_ONE_KIND}"
        if unseen := [n for n, bets in self._bets.items() if bets.is_unseen]:
            text += f"; {few(unseen)} is as near to the references as they are: not tested"
        return text, figures


@dataclass(frozen=True, slots=True)
class TrustedNodes:
    """Nodes and files that are trusted, ``references``, and such that cheat, ``suspects``."""

    references: tuple[NodeSource, ...]
    suspects: tuple[NodeSource, ...] = ()

    def require_apart(self, judged: Collection[str | None]) -> None:
        """Raise ReportedError for a node that is there twice, or is the ``judged`` one."""
        places = [each.place for each in (*self.references, *self.suspects)]
        if own := next((place for place in places if place in judged), None):
            raise ReportedError(
                f"reference: {own} is the node that is judged, and no witness of it"
            )
        if twice := next((place for place in places if places.count(place) > 1), None):
            raise ReportedError(f"reference: {twice} is given twice, and is one witness")

    def report(
        self,
        claimed: ClaimedArtifacts,
        order: Work,
        options: JudgingOptions,
        sample: tuple[str, int | None],
        line: Progress,
        truth: Truth | None = None,
    ) -> VerdictReport:
        """The verdict; ``sample`` is the seed that draws it, and how many nonces it has at most.

        ``truth`` is a checkpoint's, None without one. Raises ReportedError, ProtocolError,
        WitnessError for a reference that does not answer, and the errors of our own recomputation.
        """
        seed, most = sample
        drawn = seed, NONCES if most is None else most
        known = witnesses_of(claimed, order, self.references, self.suspects, drawn, line)
        if truth is None:
            return judged_by_nodes(claimed, known, options, seed)
        return judged_beside_checkpoint(claimed, known, truth, options, seed, line)


def judged_beside_checkpoint(
    claimed: ClaimedArtifacts,
    known: Witnesses,
    truth: Truth,
    options: JudgingOptions,
    seed: str,
    progress: Progress,
) -> VerdictReport:
    """The verdict about the witnesses' sample of ``claimed``, which ``seed`` drew.

    Raises as ``judged``, and WitnessError for a reference that serves another checkpoint.
    """
    sample = replace(claimed, nonces=tuple(known.sample))
    vet = partial(_vetted, sample, truth, options, seed, progress)
    said = [vet(each) for each in known.references]
    trusted = [
        each
        for each, opinion in zip(known.references, said, strict=True)
        if not opinion.figures["left_out"]
    ]
    report = cleared_by_bits(sample, replace(known, references=trusted), options, seed)
    if report is None:
        # Two files in two folders may have one name.
        errors = {
            f"reference {number}, {each.title}": partial(truth.errors_of, each.vectors)
            for number, each in enumerate(trusted, 1)
        }
        report = judged(sample, replace(truth, trusted=errors), options, seed, None, progress)
    names = ", ".join(each.title for each in trusted)
    outcome = replace(report.outcome, opinions=(*said, *report.outcome.opinions))
    origin = f"{report.origin}; trusted: {names or 'none'}"
    return replace(report, claimed=claimed, outcome=outcome, origin=origin)


def _vetted(
    sample: ClaimedArtifacts,
    truth: Truth,
    options: JudgingOptions,
    seed: str,
    progress: Progress,
    node: KnownNode,
) -> Opinion:
    """What the checkpoint alone says of a reference."""
    if len({node.weights_digest, truth.weights_digest} - {None}) > 1:
        text = f"it serves {node.weights_digest}, the checkpoint here has {truth.weights_digest}"
        raise WitnessError(f"weights_digest: the reference {node.name}: {text}")
    nonces = sample.nonces[:_VETTED]
    claims = claims_of_vectors({nonce: node.vectors[nonce] for nonce in nonces})
    # What the judged node owes is not the reference's.
    claimed = ClaimedArtifacts(
        *(sample.block_hash, sample.public_key, nonces, tuple(claims)),
        scheme=sample.scheme,
        ran_on=node.facts,
    )
    # Whatever tests judge the node: one that cannot convict would let a cheat be a reference.
    outcome = judged(claimed, truth, replace(options, tests=()), seed, None, progress).outcome
    if truth.validator is None:
        raise AssertionError("a checkpoint has a validator")
    own, few_nonces = BankRun(kernels=truth.validator.references[0]), nonces[:_MEASURED_ON]
    errors = truth.errors_of(node.vectors, few_nonces), truth.validator.errors(own, few_nonces)
    theirs, ours = ([np.linalg.norm(each) for each in of.values()] for of in errors)
    far = float(np.median(np.divide(theirs, ours)))
    # A calibration knows itself how long honest errors are.
    is_too_far = options.calibration is None and far > _TOO_FAR
    is_left_out = outcome.verdict is SequentialResult.FRAUD or is_too_far
    says = "is left out" if is_left_out else "counts"
    if not is_left_out and outcome.verdict is not SequentialResult.HONEST:
        says += " because you trust it"
    tests = "; ".join(f"{each.test}: {each.text}" for each in outcome.opinions)
    text = f"{node.title} {says}: errors {far:.2g} times ours; {tests}"
    figures: Figures = {"name": node.name, "left_out": is_left_out, "times_ours": far}
    return Opinion("reference", outcome.verdict, outcome.nonces_used, text, figures)
