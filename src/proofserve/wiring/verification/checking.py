"""One job of a worker: recomputes the sample and judges it, or says why it cannot."""

import math
import time
from typing import Protocol

import numpy as np

from proofserve.engines.reference.errors import CheckpointError
from proofserve.fleet import vector_texts
from proofserve.fleet.records import BatchKind
from proofserve.fleet.verification_records import (
    JobFinding,
    VerdictOutcome,
    VerificationJob,
    VerificationRule,
    VerificationTask,
)
from proofserve.lab.calibrate.calibration_file import MeasuredThreshold, calibrated, parse
from proofserve.lab.client.errors import LabError, NodeError
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.progress import NoProgress
from proofserve.lab.verify.claimed import ClaimedArtifacts
from proofserve.lab.verify.judges import Finding
from proofserve.lab.verify.opening import CommittedSource, open_sample
from proofserve.lab.verify.verdict_report import VerdictReport
from proofserve.protocol.errors import ProtocolError
from proofserve.protocol.nonces import draw
from proofserve.protocol.verdict.comparison import Claim
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.wire.records import CommittedRoots
from proofserve.wiring.judges import JudgingOptions, threshold_of
from proofserve.wiring.verification.judging import SampleOptions, Truth, judged

# As the option --p-fraud of ``proofserve verify``.
P_FRAUD = 0.5
_WRONG = (LabError, ProtocolError, CheckpointError, ValueError)


class TruthSource(Protocol):
    """Computes the vectors that a job's artifacts are compared with."""

    def truth(self, task: VerificationTask, options: JudgingOptions) -> Truth:
        """Raises LabError and CheckpointError if this worker cannot compute them."""
        ...


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
            self._require_enough(task)
            report = self._report(task)
        except NodeError:
            raise
        except _WRONG as error:
            return _abstention(str(error), began)
        return _judgement(report, task, time.perf_counter() - began)

    def _require_enough(self, task: VerificationTask) -> None:
        wanted, stored = task.job.rule.nonces, task.sample.of
        if stored < wanted:
            raise LabError(f"too few nonces: the lane has {stored} of {wanted}")

    def _report(self, task: VerificationTask) -> VerdictReport:
        job, work = task.job, task.round.spec.work
        options = _options(job, task.calibration)
        truth = self._source.truth(task, options)
        sampling = SampleOptions(job.seed, job.rule.nonces, self._at_once)
        return judged(self._claimed(task), work, truth, options, sampling, NoProgress())

    def _claimed(self, task: VerificationTask) -> ClaimedArtifacts:
        if task.sample.kind is BatchKind.ROOTS:
            return self._opened(task)
        work, sample = task.round.spec.work, task.sample
        nonces = tuple(sample.nonces.tolist())
        texts = vector_texts.encode_all(sample.vectors)
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


def _options(job: VerificationJob, calibration: str | None) -> JudgingOptions:
    rule, threshold = job.rule, _threshold(job.rule, calibration)
    return JudgingOptions(rule.tests, job.alpha, rule.beta, rule.share, P_FRAUD, True, threshold)


def _threshold(rule: VerificationRule, calibration: str | None) -> MeasuredThreshold | None:
    if calibration is not None:
        return calibrated(parse(calibration))
    return threshold_of(rule.tests, rule.dist_threshold, None, rule.p_mismatch)


def _abstention(reason: str, began: float) -> JobFinding:
    return JobFinding(VerdictOutcome.ABSTAINED, time.perf_counter() - began, reason=reason)


def _judgement(report: VerdictReport, task: VerificationTask, seconds: float) -> JobFinding:
    outcome = report.outcome
    distances = tuple(e.distance for e in outcome.errors if e.broken is None)
    decisive = _decisive(outcome.verdict, outcome.findings)
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


def _decisive(verdict: SequentialResult, findings: tuple[Finding, ...]) -> Finding:
    """The test that reached the verdict; the first one if none did."""
    return next((each for each in findings if each.result is verdict), findings[0])
