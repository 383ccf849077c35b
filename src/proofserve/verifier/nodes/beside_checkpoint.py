"""The verdict beside a checkpoint and nodes that a validator trusts.

On the very nonces the errors of these are those of measured honest kernels: they clear a node that
has their footprint, or their bits, and explain errors that would convict it. The checkpoint says
what they are: it judges each of them first, and one that it convicts is left out.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.remote.records import Work
from proofserve.reports import Progress, ReportedError
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.judges import BankRun, Figures, Opinion
from proofserve.verifier.judging import JudgingOptions, VerdictReport, judged
from proofserve.verifier.nodes.judging import cleared_by_bits, judged_by_nodes
from proofserve.verifier.nodes.sources import (
    NONCES,
    KnownNode,
    NodeSource,
    WitnessError,
    Witnesses,
    witnesses_of,
)
from proofserve.verifier.verification import Truth, claims_of_vectors

# Nonces by which the checkpoint judges a reference: weights that are rounded in three tenths of
# them are convicted after 17 to 27, honest nodes whose kernel is emulated cleared after 23 to 35.
_VETTED: Final = 35
REFERENCE: Final = "reference"
# Emulated kernels err up to 1.5 times as far as our own run. What errs so much farther, by the
# median of a few nonces, serves other weights, also where no suspect has them.
_TOO_FAR: Final = 4.0
_MEASURED_ON: Final = 3


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
    if None not in (ours := (node.weights_digest, truth.weights_digest)) and len({*ours}) > 1:
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
    far = _times_as_far(node, truth, nonces[:_MEASURED_ON])
    # A calibration knows itself how long honest errors are.
    is_too_far = options.calibration is None and far > _TOO_FAR
    is_left_out = outcome.verdict is SequentialResult.FRAUD or is_too_far
    says = "is left out" if is_left_out else "counts"
    if not is_left_out and outcome.verdict is not SequentialResult.HONEST:
        says += " because you trust it"
    tests = "; ".join(f"{each.test}: {each.text}" for each in outcome.opinions)
    text = f"{node.title} {says}: errors {far:.2g} times ours; {tests}"
    figures: Figures = {"name": node.name, "left_out": is_left_out, "times_ours": far}
    return Opinion(REFERENCE, outcome.verdict, outcome.nonces_used, text, figures)


def _times_as_far(node: KnownNode, truth: Truth, nonces: Sequence[int]) -> float:
    """How long its errors are beside those of our own run, the median."""
    if truth.validator is None:
        raise AssertionError("a checkpoint has a validator")
    own = BankRun(kernels=truth.validator.references[0])
    theirs, ours = truth.errors_of(node.vectors, nonces), truth.validator.errors(own, nonces)
    return float(np.median([np.linalg.norm(theirs[n]) / np.linalg.norm(ours[n]) for n in nonces]))
