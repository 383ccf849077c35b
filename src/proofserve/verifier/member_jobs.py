"""Jobs of a fleet's worker: recomputes the sample of a member and judges it, or says why not."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np

from proofserve.engines.reference.errors import CheckpointError
from proofserve.fleet import callback_bodies
from proofserve.fleet.records import BatchKind
from proofserve.fleet.verification_records import (
    JobFinding,
    VerdictOutcome,
    VerificationRule,
    VerificationTask,
)
from proofserve.lab.node_client import NodeClient
from proofserve.lab.report import LabError, NodeError, NoProgress
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.nonces import draw
from proofserve.protocol.verdict.comparison import Claim
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.verifier.calibration_file import (
    MeasuredThreshold,
    calibrated,
    checkpoint_shape,
    parse,
)
from proofserve.verifier.claims import ClaimedArtifacts
from proofserve.verifier.direction import Truth
from proofserve.verifier.judging import (
    JudgingOptions,
    SampleOptions,
    VerdictReport,
    judged,
    threshold_of,
)
from proofserve.verifier.openings import CommittedSource, open_sample
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup, proofs_of
from proofserve.wire.records import CommittedRoots

# As the option --p-fraud of ``proofserve verify``.
P_FRAUD = 0.5
_WRONG = (LabError, ProtocolError, CheckpointError, ValueError)


class TruthSource(Protocol):
    """Computes the vectors that a job's artifacts are compared with."""

    def truth(self, task: VerificationTask, options: JudgingOptions) -> Truth:
        """Raises LabError and CheckpointError if this worker cannot compute them."""
        ...


@dataclass(frozen=True, slots=True)
class WorkerCheckpoints:
    """The checkpoints of a worker, by queue, and how it computes with them."""

    folders: Mapping[str, Path]
    device: str = "cpu"
    forward_batch: int = 8


class CheckpointTruths:
    """The truth by checkpoints of this worker. Each is loaded once, at its first job."""

    def __init__(self, checkpoints: WorkerCheckpoints) -> None:
        self._checkpoints = checkpoints
        self._loaded: dict[ValidatorSetup, CheckpointValidator] = {}

    def truth(self, task: VerificationTask, options: JudgingOptions) -> Truth:
        job, work = task.job, task.round.spec.work
        folder = self._checkpoints.folders.get(job.queue)
        if folder is None:
            raise LabError(f"this worker has no checkpoint for {job.queue}; give it --model")
        setup = ValidatorSetup(folder, self._checkpoints.device)
        if measured := options.calibration:
            served, kv_dtype = measured.served_dtype, measured.kv_dtype
            setup = replace(setup, served_dtype=served, kv_dtype=kv_dtype)
        if setup not in self._loaded:
            self._loaded[setup] = CheckpointValidator(setup, _no_work)
        known = self._loaded[setup]
        models, shape = [job.model or folder.name, folder.name], checkpoint_shape(folder)
        options.require(work, models, shape, known.weights_digest, known.is_dense)
        validator = known.with_other(proofs_of(work, self._checkpoints.forward_batch))
        return validator.as_truth()


def _no_work(*_: object) -> NoReturn:
    raise AssertionError("each job brings its own work")


class SampleChecker:
    """Computes verdicts, one at a time.

    ``at_once`` nonces are recomputed in one forward. ``member_key`` has members open their roots.
    """

    def __init__(self, source: TruthSource, at_once: int, member_key: str | None = None) -> None:
        self._source = source
        self._at_once = at_once
        self._member_key = member_key

    def check(self, task: VerificationTask) -> JobFinding:
        """The verdict, or an abstention. Raises EngineFault and NodeError: another try may do."""
        began = time.perf_counter()
        try:
            wanted, stored = task.job.rule.nonces, task.sample.of
            if stored < wanted:
                raise LabError(f"too few nonces: the lane has {stored} of {wanted}")
            report = self._report(task)
        except NodeError:
            raise
        except _WRONG as error:
            seconds = time.perf_counter() - began
            return JobFinding(VerdictOutcome.ABSTAINED, seconds, reason=str(error))
        return _judgement(report, task, time.perf_counter() - began)

    def _report(self, task: VerificationTask) -> VerdictReport:
        job, work = task.job, task.round.spec.work
        rule, threshold = job.rule, _threshold(job.rule, task.calibration)
        options = JudgingOptions(
            rule.tests, job.alpha, rule.beta, rule.share, P_FRAUD, True, threshold
        )
        truth = self._source.truth(task, options)
        sampling = SampleOptions(job.seed, job.rule.nonces, self._at_once)
        return judged(self._claimed(task), work, truth, options, sampling, NoProgress())

    def _claimed(self, task: VerificationTask) -> ClaimedArtifacts:
        if task.sample.kind is BatchKind.ROOTS:
            return self._opened(task)
        work, sample = task.round.spec.work, task.sample
        nonces = tuple(sample.nonces.tolist())
        texts = callback_bodies.encode_all(sample.vectors)
        return ClaimedArtifacts(
            block_hash=work.block.hash,
            public_key=work.public_key,
            nonces=nonces,
            claims=tuple(map(Claim, nonces, texts)),
            width=work.scheme.width,
            seq_len=work.seq_len,
            scheme=work.scheme.name,
            block_height=work.block.height,
            weights_digest=task.job.weights_digest,
        )

    def _opened(self, task: VerificationTask) -> ClaimedArtifacts:
        work, job = task.round.spec.work, task.job
        bodies = _of_one_round(task)
        batches = [record.batch for body in bodies for record in body.roots]
        source = CommittedSource(
            round_id=bodies[0].round_id,
            block=work.block,
            public_key=work.public_key,
            lane=bodies[0].lane,
            scheme=work.scheme.name,
            width=work.scheme.width,
            seq_len=work.seq_len,
            batches=tuple(sorted(batches, key=lambda batch: batch.first_index)),
        )
        with NodeClient(task.member.url, self._member_key) as node:
            return open_sample(source, node, job.seed, job.rule.nonces, NoProgress())


def _of_one_round(task: VerificationTask) -> list[CommittedRoots]:
    """The callbacks of the sampled round; of a fleet's several, the one with a drawn nonce."""
    bodies = [CommittedRoots.model_validate(body) for body in task.sample.committed]
    sizes = np.cumsum([sum(root.count for root in body.roots) for body in bodies])
    (place,) = draw(range(int(sizes[-1])), task.job.seed, 1)
    drawn = bodies[int(np.searchsorted(sizes, place, side="right"))]
    return [body for body in bodies if body.round_id == drawn.round_id]


def _threshold(rule: VerificationRule, calibration: str | None) -> MeasuredThreshold | None:
    if calibration is not None:
        return calibrated(parse(calibration))
    return threshold_of(rule.tests, rule.dist_threshold, None, rule.p_mismatch)


def _judgement(report: VerdictReport, task: VerificationTask, seconds: float) -> JobFinding:
    outcome = report.outcome
    distances = tuple(e.distance for e in outcome.errors if e.broken is None)
    # The test that reached the verdict; the first one if none did.
    reached = (each for each in outcome.opinions if each.result is outcome.verdict)
    decisive = next(reached, outcome.opinions[0])
    threshold = _threshold(task.job.rule, task.calibration)
    figures = decisive.figures
    ratio = figures.get("likelihood_ratio")
    log_ratio = None if ratio is None else math.log(max(float(ratio), 1e-300))
    log_evidence = figures.get("log_evidence", log_ratio)
    p_value = figures.get("p_value")
    reason, said = decisive.text, VerdictOutcome.ABSTAINED
    if outcome.verdict is SequentialResult.UNEXPLAINED:
        reason = report.what_to_measure
    else:
        said = VerdictOutcome(outcome.verdict.value)
    return JobFinding(
        outcome=said,
        seconds=seconds,
        reason=reason,
        test=decisive.test,
        nonces=outcome.nonces_used,
        distance=float(np.median(distances)) if distances else None,
        threshold=threshold.dist_threshold if threshold else None,
        log_evidence=None if log_evidence is None else float(log_evidence),
        p_value=None if p_value is None else float(p_value),
        distances=distances,
        report={**report.record(), "lines": list(report.lines())},
    )
