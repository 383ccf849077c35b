"""``verify`` and ``challenge`` as functions, which return what the commands write as ``--json``.

``check_bundle`` is ``verify-bundle --check-only``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from proofserve.client.checkpoint import truths_of_checkpoint, validator_setup
from proofserve.engines.errors import CheckpointError
from proofserve.protocol.nonces import NonceLane, fresh_seed
from proofserve.protocol.verdict.sequential import SequentialResult
from proofserve.remote.node_client import BoundedClient, NodeClient, UnprovedError
from proofserve.remote.records import Work
from proofserve.reports import Progress, ReportedError
from proofserve.rounds.errors import RoundsError
from proofserve.verifier.bundle import faults_of
from proofserve.verifier.calibration_file import CalibrationFile, calibrated_order, checkpoint_shape
from proofserve.verifier.challenge import (
    DESCRIBES_ITSELF_S,
    ChallengeRecord,
    ChallengeResult,
    answer,
    fresh,
)
from proofserve.verifier.claims import ClaimedArtifacts, Selection, from_node, read_file
from proofserve.verifier.judges import ALPHA, BETA, SHARE, UnprovedRecord, VerdictRecord
from proofserve.verifier.judging import JudgingOptions, VerdictReport, judged
from proofserve.verifier.nodes.beside_checkpoint import TrustedNodes
from proofserve.verifier.nodes.sources import named
from proofserve.verifier.orders import WorkOptions, order_of, require_width, workload_of
from proofserve.verifier.verification import Truth

Calibration = CalibrationFile
# Nonces of one forward.
FORWARD_BATCH: Final = 8
# The claims, the order of which they are, and the seed and size of the sample.
_Judge = Callable[[ClaimedArtifacts, Work, tuple[str, int | None]], VerdictReport]


class VerdictError(Exception):
    """There is no verdict: an argument, the source or the recomputation is wrong."""


@contextmanager
def _verdict_errors() -> Iterator[None]:
    try:
        yield
    except (ReportedError, CheckpointError, RoundsError, ValueError, OSError) as error:
        raise VerdictError(str(error)) from error


@dataclass(frozen=True, slots=True)
class _Judging:
    """What a verdict rests on, checked before anything is asked or loaded."""

    model: Path | None
    nodes: TrustedNodes | None
    options: JudgingOptions

    def __post_init__(self) -> None:
        """Raises ReportedError for arguments that do not go together."""
        if self.model is None and (self.nodes is None or len(self.nodes.references) < 2):
            raise ReportedError("give model, or two references or more")
        if self.model is None and self.options.calibration is not None:
            raise ReportedError("calibration: it is about a checkpoint; give model")

    def judge_of(self, order: Work) -> _Judge:
        """Load the model for work as ``order``, if there is one."""
        truth_of = self._truths(order) if self.model else None

        def judge(
            claimed: ClaimedArtifacts, order: Work, sample: tuple[str, int | None]
        ) -> VerdictReport:
            claimed, truth = replace(claimed, scheme=order.scheme), None
            if truth_of is not None:
                truth = truth_of(order)
                if self.nodes is None:
                    return judged(claimed, truth, self.options, *sample, Progress())
            if self.nodes is None:
                raise AssertionError("there is a model, or there are references")
            return self.nodes.report(claimed, order, self.options, sample, Progress(), truth)

        return judge

    def _truths(self, order: Work) -> Callable[[Work], Truth]:
        model, work = Path(str(self.model)), workload_of(order)
        setup = validator_setup(model, measured=self.options.calibration)
        truths = truths_of_checkpoint(setup, work, FORWARD_BATCH, lambda _index, _of: None)
        if (measured := self.options.calibration) is not None:
            ours, shape = truths(work), checkpoint_shape(model)
            measured.require(work, [model.name], shape, ours.weights_digest, ours.is_dense)
        return lambda about: truths(workload_of(about))


def _judging(
    judged_at: str,
    model: Path | None,
    references: Sequence[str],
    reference_api_key: str | None,
    options: JudgingOptions,
) -> _Judging:
    nodes = None
    if references:
        nodes = TrustedNodes(tuple(named(place, reference_api_key) for place in references))
        nodes.require_apart({judged_at})
    return _Judging(model, nodes, options)


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
    is_node = source.startswith(("http://", "https://"))
    with _verdict_errors():
        options = JudgingOptions((), alpha, beta, share, threshold=calibration)
        judging = _judging(source, model, references, reference_api_key, options)
        try:
            if is_node:
                with NodeClient(source, api_key) as node:
                    claimed = from_node(node, wanted)
            else:
                claimed = read_file(Path(source), wanted)
            given = WorkOptions()
            order = order_of(
                claimed, calibration.completed(given, claimed) if calibration else given
            )
            if not is_node:
                require_width(claimed, order)
            report = judging.judge_of(order)(claimed, order, (seed or fresh_seed(), nonces))
        except UnprovedError as error:
            unproved: Final = SequentialResult.UNPROVED
            return {"verdict": unproved, "reason": error.kind, "text": str(error)}
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
        asked, judge = fresh(order, nonces), judging.judge_of(order)
        try:
            with BoundedClient(url, api_key, DESCRIBES_ITSELF_S) as node:
                found = answer(node, asked, deadline_s)
            report = judge(found.claimed, found.order, (fresh_seed(), None))
        except UnprovedError as error:
            unproved, text = SequentialResult.UNPROVED, str(error)
            return ChallengeResult(unproved, asked, text, error.seconds, kind=error.kind).record()
    verdict = report.outcome.verdict
    return ChallengeResult(verdict, asked, report.reason, found.seconds, found, report).record()


def check_bundle(file: Path) -> list[str]:
    """What does not hold in another validator's bundle; empty if signatures and arithmetic do.

    It computes no vector. Raises VerdictError for a file that is no bundle.
    """
    with _verdict_errors():
        return [*faults_of(file)]
