"""Jobs of a fleet's worker: recomputes the sample of a member and judges it, or says why not."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from proofserve.engines.errors import CheckpointError
from proofserve.fleet import callback_bodies
from proofserve.fleet.verification_records import (
    JobFinding,
    JudgedBy,
    VerdictOutcome,
    VerificationTask,
)
from proofserve.protocol.codec import decode
from proofserve.protocol.errors import MalformedVector, ProtocolError
from proofserve.protocol.nonces import draw
from proofserve.protocol.verdict.comparison import Claim
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.remote.node_client import NodeClient, Unproved, UnprovedError, Withheld, owed_by
from proofserve.reports import Progress, ReportedError
from proofserve.verifier.calibration_file import CalibrationFile, checkpoint_shape
from proofserve.verifier.claims import ClaimedArtifacts, kernel_facts
from proofserve.verifier.judges import SHARE
from proofserve.verifier.judging import JudgingOptions, VerdictReport, judged, threshold_of
from proofserve.verifier.nodes.members import judged_by_members
from proofserve.verifier.nodes.sources import KnownNode, NodeSource
from proofserve.verifier.openings import CommittedSource, open_sample
from proofserve.verifier.orders import order_for
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup, proofs_of
from proofserve.verifier.verification import Truth
from proofserve.wire.records import CommittedRoots

# The figures of a test that a finding has.
_SHOWN = ("likelihood_ratio", "log_evidence", "p_value")
_WRONG = (ReportedError, ProtocolError, CheckpointError, ValueError)


class CheckpointTruths:
    """The truth by checkpoints in ``folders``, by queue; each is loaded once, at its first job."""

    def __init__(
        self, folders: Mapping[str, Path], device: str = "cpu", forward_batch: int = 8
    ) -> None:
        self._folders = folders
        self._device = device
        self._forward_batch = forward_batch
        self._loaded: dict[ValidatorSetup, CheckpointValidator] = {}

    def __call__(self, task: VerificationTask, options: JudgingOptions) -> Truth:
        """What a job is compared with.

        Raises ReportedError and CheckpointError if that fails here.
        """
        job, work, measured = task.job, task.round.spec.work, options.calibration
        folder = self._folders.get(job.queue)
        if folder is None:
            raise ReportedError(f"this worker has no checkpoint for {job.queue}; give it --model")
        setup = ValidatorSetup(folder, self._device).serving_as(measured)
        if setup not in self._loaded:
            self._loaded[setup] = CheckpointValidator(setup)
        known = self._loaded[setup]
        if measured is not None:
            models, shape = [job.model or folder.name, folder.name], checkpoint_shape(folder)
            measured.require(work, models, shape, known.weights_digest, known.is_dense)
        validator = known.with_other(proofs_of(work, self._forward_batch))
        return validator.as_truth(work.scheme.width, self._forward_batch)


def check_sample(
    task: VerificationTask,
    truth: Callable[[VerificationTask, JudgingOptions], Truth],
    member_key: str | None = None,
) -> JobFinding:
    """The verdict, or an abstention. Raises EngineFault: another try may do.

    ``truth`` is as ``CheckpointTruths``. ``member_key`` has members open their roots.
    """
    began = time.perf_counter()
    try:
        job, rule = task.job, task.job.rule
        if task.sample.of < rule.nonces:
            raise ReportedError(f"too few nonces: the lane has {task.sample.of} of {rule.nonces}")
        if task.calibration is None:
            threshold = threshold_of(rule.tests, rule.dist_threshold, None, rule.p_mismatch)
        else:
            threshold = CalibrationFile.model_validate_json(task.calibration)
        share = SHARE if rule.share is None else rule.share
        options = JudgingOptions(rule.tests, job.alpha, rule.beta, share, threshold=threshold)
        if rule.by is JudgedBy.MEMBERS:
            report = _by_members(task, options, member_key)
        else:
            known, claimed = truth(task, options), _claimed(task, member_key)
            report = judged(claimed, known, options, job.seed, rule.nonces, Progress())
    except UnprovedError as error:
        seconds = time.perf_counter() - began
        why = f"{error.kind}: {error}"
        return JobFinding(VerdictOutcome.UNPROVED, seconds, reason=why)
    except _WRONG as error:
        seconds = time.perf_counter() - began
        return JobFinding(VerdictOutcome.ABSTAINED, seconds, reason=str(error))
    limit = threshold.dist_threshold if threshold else None
    return _judgement(report, limit, time.perf_counter() - began)


def _by_members(
    task: VerificationTask, options: JudgingOptions, member_key: str | None
) -> VerdictReport:
    claimed = _claimed(task, member_key)
    order = order_for(task.round.spec.work, task.job.model or "")
    with NodeClient(task.member.url, member_key) as node, owed_by(task.member.url):
        facts = kernel_facts(task.member.name, node.kernels())
    vectors = {}
    for claim in claimed.claims:
        with suppress(MalformedVector):
            vectors[claim.nonce] = decode(claim.vector_b64, order.width)
    member = KnownNode(task.member.name, vectors, facts, claimed.weights_digest)
    others = [NodeSource(each.name, each.url, member_key) for each in task.others]
    return judged_by_members(claimed, order, member, others, options, task.job.seed)


def _claimed(task: VerificationTask, member_key: str | None) -> ClaimedArtifacts:
    if task.sample.committed:
        return _opened(task, member_key)
    work, sample = task.round.spec.work, task.sample
    nonces, withheld = tuple(sample.nonces.tolist()), None
    if sample.missing:
        drawn = len(nonces) + sample.missing
        text = f"{sample.missing} of {drawn} drawn nonces of the lane have not come"
        if not nonces:
            raise UnprovedError(Unproved.UNDELIVERED, text)
        withheld = Withheld(Unproved.UNDELIVERED, text)
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
        withheld=withheld,
    )


def _opened(task: VerificationTask, member_key: str | None) -> ClaimedArtifacts:
    work, job = task.round.spec.work, task.job
    bodies = [CommittedRoots.model_validate(body) for body in task.sample.committed]
    # Of a fleet's several rounds, the one with a drawn nonce is sampled.
    sizes = np.cumsum([sum(root.count for root in body.roots) for body in bodies])
    (place,) = draw(range(int(sizes[-1])), job.seed, 1)
    drawn = bodies[int(np.searchsorted(sizes, place, side="right"))]
    bodies = [body for body in bodies if body.round_id == drawn.round_id]
    batches = [record.batch for body in bodies for record in body.roots]
    source = CommittedSource(
        round_id=drawn.round_id,
        block=work.block,
        public_key=work.public_key,
        lane=bodies[0].lane,
        scheme=work.scheme.name,
        width=work.scheme.width,
        seq_len=work.seq_len,
        batches=tuple(sorted(batches, key=lambda batch: batch.first_index)),
    )
    with NodeClient(task.member.url, member_key) as node:
        return open_sample(source, node, job.seed, job.rule.nonces, Progress())


def _judgement(report: VerdictReport, limit: float | None, seconds: float) -> JobFinding:
    outcome = report.outcome
    distances = tuple(e.distance for e in outcome.errors if e.broken is None)
    # The test that reached the verdict; the first one if none did.
    reached = (each for each in outcome.opinions if each.result is outcome.verdict)
    decisive = next(reached, outcome.opinions[0])
    figures = {name: float(decisive.figures[name]) for name in _SHOWN if name in decisive.figures}
    if "likelihood_ratio" in figures:
        figures.setdefault("log_evidence", math.log(max(figures["likelihood_ratio"], 1e-300)))
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
        threshold=limit,
        log_evidence=figures.get("log_evidence"),
        p_value=figures.get("p_value"),
        distances=distances,
        report={**report.record(), "lines": list(report.lines())},
    )
