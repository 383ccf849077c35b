"""Members of a fleet: a worker's jobs recompute their samples, or have other members do so.

Where members judge each other, none is trusted, but most are taken as honest.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from proofserve.engines import CheckpointError
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
from proofserve.protocol.verdict.comparison import Claim, claim_errors
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.protocol.verdict.nearness import ENOUGH
from proofserve.remote.node_client import NodeClient, Unproved, UnprovedError, Withheld, owed_by
from proofserve.remote.records import Work
from proofserve.reports import Progress, ReportedError
from proofserve.verifier.calibration_file import CalibrationFile, threshold_of
from proofserve.verifier.claims import ClaimedArtifacts, kernel_facts
from proofserve.verifier.judges import SHARE, Opinion
from proofserve.verifier.judging import (
    COUNT,
    WHAT_TO_MEASURE,
    JudgingOptions,
    VerdictReport,
    judged,
)
from proofserve.verifier.nodes.judging import judged_by_distance, truth_of
from proofserve.verifier.nodes.sources import (
    KnownNode,
    NodeSource,
    WitnessError,
    Witnesses,
    are_alike,
    asked,
    equal_bits,
)
from proofserve.verifier.openings import CommittedSource, open_sample
from proofserve.verifier.orders import order_for
from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup
from proofserve.verifier.verification import Truth, Verification, nonces_needed, settled
from proofserve.wire.records import CommittedRoots

# The figures of a test that a finding has.
_SHOWN = ("likelihood_ratio", "log_evidence", "p_value")
_WRONG = (ReportedError, ProtocolError, CheckpointError, ValueError)


def judged_by_members(
    claimed: ClaimedArtifacts,
    order: Work,
    member: KnownNode,
    others: Sequence[NodeSource],
    options: JudgingOptions,
    seed: str,
) -> VerdictReport:
    """The verdict about the nonces of ``claimed``, which ``others`` compute now, each once.

    ``member`` has what is claimed, and what the member says of itself. It is cleared by the bits
    that more than half of all have, or by distances; convicted by distances from three others
    that differ. If most have bits that it has not, though it says that it is as they are, it has
    not proved. Raises UnprovedError for that, ReportedError if too few others answer.
    """
    found, silent = _answers(order, others, claimed)
    if len(found) < 2:
        text = f"{len(found)} of {len(others)} other members answered, and two are needed"
        raise ReportedError(f"{text}: {'; '.join(silent)}" if silent else text)
    nonces = claimed.nonces
    alike = _by_bits(found, nonces)
    same = [each for each in found if equal_bits(each, member, nonces) == len(nonces)]
    everyone, agreeing = len(found) + 1, len(same) + 1
    enough = len(nonces) >= nonces_needed(options.chances())
    if same and 2 * agreeing > everyone and enough and not claimed.faults:
        text = f"its bits are those of {agreeing - 1} of {everyone - 1} other members"
        return _report(claimed, found[0], options, seed, SequentialResult.HONEST, text)
    largest = max(alike, key=len)
    is_other = not any(are_alike(each, member, nonces) for each in largest)
    # Whether it has the same card and engine by its own words, as all of them.
    is_same = member.kind is not None and all(each.facts == member.facts for each in largest)
    if is_other and is_same and 2 * len(largest) > everyone:
        text = (
            f"it says that it is as {len(largest)} other members, which have equal bits,"
            " and has other bits"
        )
        raise UnprovedError(Unproved.OTHER_BITS, text)
    different = [each[0] for each in alike]
    if len(different) < ENOUGH:
        text = (
            f"its bits are those of {agreeing - 1} of {everyone - 1} other members, and"
            f" {len(different)} of these differ: distances need {ENOUGH} that do"
        )
        return _report(claimed, found[0], options, seed, SequentialResult.UNDECIDED, text)
    known = Witnesses(different, (), nonces)
    return judged_by_distance(claimed, known, options, seed)


def _answers(
    order: Work, others: Sequence[NodeSource], claimed: ClaimedArtifacts
) -> tuple[list[KnownNode], list[str]]:
    """Those that answered, and why others did not: one that is down delays no verdict."""

    def answer(source: NodeSource) -> KnownNode | str:
        try:
            made = asked(source, order, claimed.nonces)
            claimed.require_digest(made.weights_digest)
        except (WitnessError, UnprovedError) as error:
            # Another digest is no fault of the member that is judged.
            return str(error)
        return made

    with ThreadPoolExecutor(max(1, len(others))) as threads:
        made = list(threads.map(answer, others))
    found = [each for each in made if isinstance(each, KnownNode)]
    return found, [each for each in made if isinstance(each, str)]


def _by_bits(found: Sequence[KnownNode], nonces: Sequence[int]) -> list[list[KnownNode]]:
    """Members that have the same bits in many nonces are together: they are one witness."""
    alike: list[list[KnownNode]] = []
    for node in found:
        known = next((each for each in alike if are_alike(each[0], node, nonces)), None)
        if known is None:
            alike.append([node])
        else:
            known.append(node)
    return alike


def _report(
    claimed: ClaimedArtifacts,
    beside: KnownNode,
    options: JudgingOptions,
    seed: str,
    verdict: SequentialResult,
    text: str,
) -> VerdictReport:
    """A verdict by bits, with the distances from one of the others."""
    ours = truth_of(beside, claimed.nonces)
    errors = claim_errors(claimed.nonces, beside.vectors, claimed.claims, ours.width)
    opinion = Opinion("members", verdict, len(claimed.nonces), text, {})
    found = settled(Verification(verdict, (opinion,), errors), claimed, ours)
    return VerdictReport(found, claimed, seed, options, "most members", how="compared")


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
        """What a job is compared with. Raises ReportedError and CheckpointError."""
        job, work, measured = task.job, task.round.spec.work, options.calibration
        folder = self._folders.get(job.queue)
        if folder is None:
            raise ReportedError(f"this worker has no checkpoint for {job.queue}; give it --model")
        setup = ValidatorSetup(folder, self._device).serving_as(measured)
        if setup not in self._loaded:
            self._loaded[setup] = CheckpointValidator(setup)
        known = self._loaded[setup]
        known.require(measured, work, [job.model] if job.model else [])
        return known.truth_about(work, self._forward_batch)


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
            needed = COUNT in rule.tests
            threshold = threshold_of(rule.dist_threshold, None, rule.p_mismatch, needed=needed)
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
        outcome, why = VerdictOutcome.UNPROVED, f"{error.kind}: {error}"
    except _WRONG as error:
        outcome, why = VerdictOutcome.ABSTAINED, str(error)
    else:
        return _judgement(report, time.perf_counter() - began)
    return JobFinding(outcome, time.perf_counter() - began, reason=why)


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
    source = CommittedSource(
        round_id=drawn.round_id,
        block=work.block,
        public_key=work.public_key,
        lane=bodies[0].lane,
        scheme=work.scheme.name,
        width=work.scheme.width,
        seq_len=work.seq_len,
        batches=tuple(record.batch for body in bodies for record in body.roots),
    )
    with NodeClient(task.member.url, member_key) as node:
        return open_sample(source, node, job.seed, job.rule.nonces, Progress())


def _judgement(report: VerdictReport, seconds: float) -> JobFinding:
    outcome, threshold = report.outcome, report.options.threshold
    distances = tuple(e.distance for e in outcome.errors if e.broken is None)
    # The test that reached the verdict; the first one if none did.
    reached = (each for each in outcome.opinions if each.result is outcome.verdict)
    decisive = next(reached, outcome.opinions[0])
    figures = {name: float(decisive.figures[name]) for name in _SHOWN if name in decisive.figures}
    if "likelihood_ratio" in figures:
        figures.setdefault("log_evidence", math.log(max(figures["likelihood_ratio"], 1e-300)))
    unexplained = outcome.verdict is SequentialResult.UNEXPLAINED
    return JobFinding(
        VerdictOutcome.ABSTAINED if unexplained else VerdictOutcome(outcome.verdict.value),
        seconds,
        reason=WHAT_TO_MEASURE if unexplained else decisive.text,
        test=decisive.test,
        nonces=outcome.nonces_used,
        distance=float(np.median(distances)) if distances else None,
        threshold=threshold.dist_threshold if threshold else None,
        log_evidence=figures.get("log_evidence"),
        p_value=figures.get("p_value"),
        distances=distances,
        report={**report.record(), "lines": list(report.lines())},
    )
