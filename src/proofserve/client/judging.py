"""How commands and programs judge: claims are read, and a checkpoint or trusted nodes compared.

At the end are ``verify`` and ``challenge`` as functions, which return what the commands write as
``--json``, and ``check_bundle``, which is ``verify-bundle --check-only``. torch is imported only
with a checkpoint.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from proofserve.engines import CheckpointError
from proofserve.protocol.nonces import NonceLane, fresh_seed
from proofserve.protocol.verdict.counting import SequentialResult
from proofserve.remote.node_client import BoundedClient, NodeClient, Transcript, UnprovedError
from proofserve.remote.records import Work
from proofserve.reports import Progress, ReportedError
from proofserve.rounds.errors import RoundsError
from proofserve.rounds.records import Workload
from proofserve.verifier.bundle import faults_of
from proofserve.verifier.calibration_file import CalibrationFile, calibrated_order
from proofserve.verifier.challenge import (
    DESCRIBES_ITSELF_S,
    ChallengeRecord,
    ChallengeResult,
    FreshChallenge,
    answer,
    fresh,
)
from proofserve.verifier.claims import ClaimedArtifacts, Selection, from_node, read_file
from proofserve.verifier.judges import ALPHA, BETA, SHARE
from proofserve.verifier.judging import (
    JudgingOptions,
    UnprovedRecord,
    VerdictRecord,
    VerdictReport,
    judged,
)
from proofserve.verifier.nodes.judging import TrustedNodes
from proofserve.verifier.nodes.sources import WitnessError, is_url, named
from proofserve.verifier.orders import WorkOptions, order_of, require_width, workload_of

if TYPE_CHECKING:
    from proofserve.verifier.validator import CheckpointValidator, ValidatorSetup

# Nonces of one forward.
FORWARD_BATCH: Final = 8
# The verdict about claims, by the order of which they are, and the seed and size of the sample.
ClaimsJudge = Callable[[ClaimedArtifacts, Work, tuple[str, int | None]], VerdictReport]
# Its name for programs.
Calibration = CalibrationFile


@contextmanager
def reference_extra() -> Iterator[None]:
    """Raises ReportedError, which names the extra, if an import within lacks a package."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ReportedError(f"{error}; install proofserve with its extra `reference`") from error


def validator_setup(
    model: Path,
    device: str = "cpu",
    suspects: Sequence[Path] | None = None,
    measured: CalibrationFile | None = None,
    kv_dtype: str = "auto",
) -> "ValidatorSetup":
    """Honest nodes serve as in the calibration ``measured``, or as the checkpoint says.

    Raises ReportedError without the extra ``reference``, and for a ``kv_dtype`` that no server has.
    """
    # Its import takes seconds, and --help must not wait for it.
    with reference_extra():
        from proofserve.verifier.validator import KV_DTYPES, ValidatorSetup  # noqa: PLC0415
    if kv_dtype not in KV_DTYPES:
        raise ReportedError(f"--kv-cache {kv_dtype}: choose from {', '.join(KV_DTYPES)}")
    setup = ValidatorSetup(model, device, tuple(suspects or ()), kv_dtype=kv_dtype)
    return setup.serving_as(measured)


def proof_validator(
    setup: "ValidatorSetup",
    work: Workload,
    forward_batch: int,
    passed: Callable[[int, int], None] = lambda _index, _of: None,
) -> "CheckpointValidator":
    """Loads the checkpoint. ``passed`` hears of each layer, of how many."""
    from proofserve.verifier.validator import CheckpointValidator, proofs_of  # noqa: PLC0415

    return CheckpointValidator(setup, proofs_of(work, forward_batch, passed))


@dataclass(frozen=True, slots=True)
class Judging:
    """What a verdict rests on: the checkpoint ``model``, ``nodes`` that are trusted, or both."""

    model: Path | None
    nodes: TrustedNodes | None
    options: JudgingOptions
    device: str = "cpu"
    suspects: Sequence[Path] = ()
    forward_batch: int = FORWARD_BATCH

    def setup(self) -> "ValidatorSetup":
        """That of the model. Raises ReportedError without one, and as ``validator_setup``."""
        if self.model is None:
            raise ReportedError("give --model CHECKPOINT")
        return validator_setup(self.model, self.device, self.suspects, self.options.calibration)

    def judge_of(self, order: Work, progress: Progress) -> ClaimsJudge:
        """Load the model, if there is one, for work as ``order``.

        Raises ReportedError, which names the field, for a calibration that is of other work.
        """
        loaded = None
        if self.model is not None:
            progress.step(f"loading {self.model}")
            work = workload_of(order)
            loaded = proof_validator(self.setup(), work, self.forward_batch, progress.layer)
            loaded.require(self.options.calibration, work)

        def judge(
            claimed: ClaimedArtifacts, order: Work, sample: tuple[str, int | None]
        ) -> VerdictReport:
            # The source need not say its scheme.
            claimed, truth = replace(claimed, scheme=order.scheme), None
            if loaded is not None:
                work = workload_of(order)
                truth = loaded.truth_about(work, self.forward_batch, progress.layer)
            if self.nodes is not None:
                return self.nodes.report(claimed, order, self.options, sample, progress, truth)
            if truth is None:
                raise AssertionError("there is a model, or there are nodes")
            return judged(claimed, truth, self.options, *sample, progress)

        return judge


def claims_of(
    source: str, api_key: str | None, wanted: Selection, heard: Transcript | None = None
) -> ClaimedArtifacts:
    """What a node's URL or a file claims; ``heard`` keeps the answers of a node.

    Raises ReportedError, UnprovedError and ValueError.
    """
    if not is_url(source):
        return read_file(Path(source), wanted)
    with NodeClient(source, api_key, transcript=heard) as node:
        return from_node(node, wanted)


def claimed_order(
    claimed: ClaimedArtifacts,
    given: WorkOptions,
    measured: CalibrationFile | None,
    *,
    is_file: bool,
) -> Work:
    """A file may have vectors of any length; a node is asked for those of the scheme."""
    said = given if measured is None else measured.completed(given, claimed)
    order = order_of(claimed, said)
    if is_file and (given.k_dim is None or (said.scheme or claimed.scheme) is None):
        require_width(claimed, order)
    return order


def challenged(
    node: tuple[str, str | None],
    asked: FreshChallenge,
    deadline_s: float,
    judge: ClaimsJudge,
    heard: Transcript | None = None,
) -> ChallengeResult:
    """Have a node at a URL, with a key, compute what is ``asked``, and judge its answer.

    Unproved, if it does not answer as it owes; no verdict, if a trusted node does not answer.
    Raises the errors of our own recomputation.
    """
    try:
        with BoundedClient(*node, DESCRIBES_ITSELF_S, heard) as client:
            found = answer(client, asked, deadline_s)
        report = judge(found.claimed, found.order, (fresh_seed(), None))
    except UnprovedError as error:
        unproved, text = SequentialResult.UNPROVED, str(error)
        return ChallengeResult(unproved, asked, text, error.seconds, kind=error.kind)
    except WitnessError as error:
        none = SequentialResult.UNEXPLAINED
        return ChallengeResult(none, asked, str(error), found.seconds, found)
    verdict, reason = report.outcome.verdict, report.reason
    return ChallengeResult(verdict, asked, reason, found.seconds, found, report)


def unproved_record(error: UnprovedError) -> UnprovedRecord:
    """What ``verify`` writes if the prover owes what it does not show."""
    return {"verdict": SequentialResult.UNPROVED, "reason": error.kind, "text": str(error)}


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
