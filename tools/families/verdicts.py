"""A validator with a calibration of emulated kernels, as ``verify`` judges by."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from families.candidates import Candidate
from families.results import Judged
from proofserve.protocol.identity import Block
from proofserve.protocol.nonces import fresh_seed
from proofserve.protocol.verdict.comparison import Claim
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.records import Work, vectors_of
from proofserve.reports import Progress
from proofserve.rounds.records import Workload
from proofserve.verifier.calibration_file import CalibrationFile, KernelFacts
from proofserve.verifier.chat.conversation import Conversation
from proofserve.verifier.chat.statements import NodeFacts
from proofserve.verifier.chat.verification import ChatChecker
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.judges import OWN, Chances, Vectors
from proofserve.verifier.judging import JudgingOptions, judged
from proofserve.verifier.noise import MeasuringPlan, checked, honest_runs, measured_calibration
from proofserve.verifier.orders import vector_scheme
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup, proofs_of
from proofserve_lab.checks import Check

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
        load = workload(work)
        self._work, self._progress = work, progress
        setup = ValidatorSetup(folder, kv_dtype=candidate.kv_dtype)
        self._validator = CheckpointValidator(setup, proofs_of(load, FORWARD_BATCH))
        self._truth = self._validator.as_truth(load.scheme.width, FORWARD_BATCH)
        self._options = JudgingOptions(threshold=self._calibration(candidate, measured))

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

    def _calibration(
        self, candidate: Candidate, measured: Sequence[tuple[KernelFacts, Vectors]]
    ) -> CalibrationFile:
        """Of emulated kernels and what is ``measured``, as `calibrate noise` makes it."""
        work = self._work
        about = {
            "model": work.model,
            "shape": None,
            "kv_dtype": candidate.kv_dtype,
            "scheme": work.scheme,
            "stronger_rng": False,
            "seq_len": work.seq_len,
            "k_dim": work.k_dim,
            "block_hash": work.block_hash,
            "public_key": work.public_key,
        }
        plan = MeasuringPlan(CALIBRATED, len(CALIBRATED), BANK)
        runs = honest_runs(measured, self._validator.truth(CALIBRATED))
        made = measured_calibration(self._validator, runs, plan, about, self._progress)
        return checked(made, self._progress, LEFT_OUT)


def workload(work: Work) -> Workload:
    """What a node computes that gets ``work``."""
    scheme = vector_scheme(str(work.scheme), work.k_dim, stronger_rng=False)
    block = Block(work.block_hash, work.block_height)
    return Workload(scheme, block, work.public_key, work.seq_len)


def receipts_hold(model: Path, chats: Sequence[Conversation], progress: Progress) -> Check:
    """The verdict of `verify-chat` without a calibration."""
    checker = ChatChecker(ValidatorSetup(model), None, fresh_seed())
    known, chances = NodeFacts(checker.weights_digest), Chances()
    found = checker.outcome(chats, known, chances, progress)
    said = [f"{each.check}: {each.text}" for each in found.failures]
    said += [f"{each.test} {each.result}: {each.text}" for each in found.opinions]
    passed = found.verdict is SequentialResult.HONEST and not found.gaps
    return Check("receipts", passed, f"{found.verdict}; {'; '.join(said)}")
