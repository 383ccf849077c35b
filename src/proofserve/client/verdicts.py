"""``verify`` and ``challenge`` as functions, which return what the commands write as ``--json``.

``check_bundle`` is ``verify-bundle --check-only``.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from proofserve.client.judging import (
    Judging,
    challenged,
    claimed_order,
    claims_of,
    is_url,
    unproved_record,
)
from proofserve.engines import CheckpointError
from proofserve.protocol.nonces import NonceLane, fresh_seed
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.node_client import UnprovedError
from proofserve.reports import Progress, ReportedError
from proofserve.rounds.errors import RoundsError
from proofserve.verifier.bundle import faults_of
from proofserve.verifier.calibration_file import CalibrationFile, calibrated_order
from proofserve.verifier.challenge import ChallengeRecord, fresh
from proofserve.verifier.claims import Selection
from proofserve.verifier.judges import ALPHA, BETA, SHARE
from proofserve.verifier.judging import JudgingOptions, UnprovedRecord, VerdictRecord
from proofserve.verifier.nodes.judging import TrustedNodes
from proofserve.verifier.nodes.sources import named
from proofserve.verifier.orders import WorkOptions

Calibration = CalibrationFile


class VerdictError(Exception):
    """There is no verdict: an argument, the source or the recomputation is wrong."""


@contextmanager
def _verdict_errors() -> Iterator[None]:
    try:
        yield
    except (ReportedError, CheckpointError, RoundsError, ValueError, OSError) as error:
        raise VerdictError(str(error)) from error


def _judging(
    judged_at: str,
    model: Path | None,
    references: Sequence[str],
    reference_api_key: str | None,
    options: JudgingOptions,
) -> Judging:
    """Raises ReportedError for arguments that do not go together, before anything is asked."""
    nodes = None
    if references:
        nodes = TrustedNodes(tuple(named(place, reference_api_key) for place in references))
        nodes.require_apart({judged_at})
    if model is None and len(references) < 2:
        raise ReportedError("give model, or two references or more")
    if model is None and options.calibration is not None:
        raise ReportedError("calibration: it is about a checkpoint; give model")
    return Judging(model, nodes, options)


def verify(  # noqa: PLR0913
    source: str,
    *,
    model: Path | None = None,
    calibration: Calibration | None = None,
    references: Sequence[str] = (),
    block_hash: str | None = None,
    public_key: str | None = None,
    lane: tuple[int, int] | None = None,
    nonces: int | None = None,
    seed: str | None = None,
    alpha: float = ALPHA,
    beta: float = BETA,
    share: float = SHARE,
    api_key: str | None = None,
    reference_api_key: str | None = None,
) -> VerdictRecord | UnprovedRecord:
    """The verdict about what a node published: ``source`` is its URL, or a file of ``verify``.

    It is judged by the checkpoint in the folder ``model``, by ``references``, URLs and files of
    nodes that are trusted, or by both. The rest is as for the command: ``lane`` has the first nonce
    that was owed, and the step to the next. Raises VerdictError.
    """
    wanted = Selection(block_hash, public_key, lane and NonceLane(*lane))
    with _verdict_errors():
        options = JudgingOptions((), alpha, beta, share, threshold=calibration)
        judging = _judging(source, model, references, reference_api_key, options)
        try:
            claimed = claims_of(source, api_key, wanted)
            is_file = not is_url(source)
            order = claimed_order(claimed, WorkOptions(), calibration, is_file=is_file)
            judge = judging.judge_of(order, Progress())
            report = judge(claimed, order, (seed or fresh_seed(), nonces))
        except UnprovedError as error:
            return unproved_record(error)
    return {**report.record(), "expected": asdict(wanted)}


def challenge(  # noqa: PLR0913
    url: str,
    *,
    model: Path | None = None,
    calibration: Calibration | None = None,
    references: Sequence[str] = (),
    nonces: int = 100,
    deadline_s: float = 60.0,
    alpha: float = ALPHA,
    beta: float = BETA,
    share: float = SHARE,
    api_key: str | None = None,
    reference_api_key: str | None = None,
) -> ChallengeRecord:
    """Have the node at ``url`` compute nonces that were drawn just now, and judge it as ``verify``.

    The whole answer has to come within ``deadline_s``. ``outcome`` is the verdict, or unproved.
    Several challenges of a day have ``alpha`` each, not together. Raises VerdictError.
    """
    with _verdict_errors():
        options = JudgingOptions((), alpha, beta, share, threshold=calibration)
        judging = _judging(url, model, references, reference_api_key, options)
        order = calibrated_order(calibration)
        judge = judging.judge_of(order, Progress())
        result = challenged((url, api_key), fresh(order, nonces), deadline_s, judge)
    if result.report is None and result.outcome is SequentialResult.UNEXPLAINED:
        raise VerdictError(result.reason)
    return result.record()


def check_bundle(file: Path) -> list[str]:
    """What does not hold in another validator's bundle; empty if signatures and arithmetic do.

    It computes no vector. Raises VerdictError for a file that is no bundle.
    """
    with _verdict_errors():
        return [*faults_of(file)]
