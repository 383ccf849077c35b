"""A validator with a calibration of emulated kernels, as ``verify`` judges by."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from families.candidates import Candidate
from families.results import Judged
from measuring.nodes import about_calibration
from proofserve.protocol.nonces import fresh_seed
from proofserve.protocol.verdict.comparison import Claim
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.records import Work, vectors_of
from proofserve.reports import Progress
from proofserve.verifier.calibration_file import KernelFacts
from proofserve.verifier.chat.conversation import Conversation
from proofserve.verifier.chat.statements import NodeFacts
from proofserve.verifier.chat.verification import ChatChecker
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.judges import OWN, Chances, Vectors
from proofserve.verifier.judging import JudgingOptions, judged
from proofserve.verifier.noise import MeasuringPlan, checked, honest_runs, measured_calibration
from proofserve.verifier.orders import workload_of
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup, proofs_of
from proofserve_lab.check.checks import Check

FORWARD_BATCH: Final = 8
# Nonces that nodes prove, and those of the calibration, on some of which suspects are measured.
JUDGED: Final = range(48)
CALIBRATED: Final = tuple(range(48, 112))
BANK: Final = 32
# Of each kernel that the calibration is tried without.
LEFT_OUT: Final = 1000


class Validator:
    """Judges nodes of one checkpoint. Making it measures the calibration (minutes).

    ``measured`` has what honest servers sent for ``CALIBRATED``.
    """

    def __init__(
        self,
        candidate: Candidate,
        folder: Path,
        work: Work,
        measured: Sequence[tuple[KernelFacts, Vectors]],
        progress: Progress,
    ) -> None:
        load = workload_of(work)
        self._work, self._progress = work, progress
        setup = ValidatorSetup(folder, kv_dtype=candidate.kv_dtype)
        self._validator = made = CheckpointValidator(setup, proofs_of(load, FORWARD_BATCH))
        self._truth = made.as_truth(load.scheme.width, FORWARD_BATCH)
        plan = MeasuringPlan(CALIBRATED, len(CALIBRATED), BANK)
        runs = honest_runs(measured, made.truth(CALIBRATED))
        said = about_calibration(work.model, load, candidate.kv_dtype)
        known = checked(measured_calibration(made, runs, plan, said, progress), progress, LEFT_OUT)
        self._options = JudgingOptions(threshold=known)

    def judged(self, name: str, claims: Sequence[Claim], ran_on: Mapping[str, object]) -> Judged:
        """The verdict about what a node proved, and says it ran on, as ``verify`` reaches it."""
        work, nonces = self._work, tuple(JUDGED)
        claimed = ClaimedArtifacts(
            *(work.block_hash, work.public_key, nonces, tuple(claims)),
            scheme=work.scheme,
            ran_on=ran_on,
        )
        report = judged(claimed, self._truth, self._options, fresh_seed(), None, self._progress)
        found, own = vectors_of(claims, work.width), self._validator.errors(OWN, nonces)
        truth = self._validator.truth(nonces)
        errors = np.array([np.linalg.norm(found[n] - truth[n]) for n in nonces])
        usual = np.array([np.linalg.norm(own[n]) for n in nonces])
        return Judged(
            node=name,
            verdict=str(report.outcome.verdict),
            nonces=report.outcome.nonces_used,
            size=float(np.median(errors / usual)),
            error=float(np.median(errors)),
            most=float(errors.max()),
            closest=report.closest,
        )


def receipts_hold(model: Path, chats: Sequence[Conversation], progress: Progress) -> Check:
    """The verdict of `verify-chat` without a calibration."""
    checker = ChatChecker(ValidatorSetup(model), None, fresh_seed())
    known, chances = NodeFacts(checker.weights_digest), Chances()
    found = checker.outcome(chats, known, chances, progress)
    said = [f"{each.check}: {each.text}" for each in found.failures]
    said += [f"{each.test} {each.result}: {each.text}" for each in found.opinions]
    passed = found.verdict is SequentialResult.HONEST and not found.gaps
    return Check("receipts", passed, f"{found.verdict}; {'; '.join(said)}")
