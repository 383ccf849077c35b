"""A verdict about claimed artifacts, for ``proofserve verify`` and for workers of a fleet."""

from dataclasses import dataclass

from proofserve.lab.client.progress import Progress
from proofserve.lab.verify.claimed import ClaimedArtifacts
from proofserve.lab.verify.direction import KernelBank
from proofserve.lab.verify.exact import ExactJudge, TrustedEngine
from proofserve.lab.verify.judges import Recompute
from proofserve.lab.verify.verdict_report import VerdictReport
from proofserve.lab.verify.verification import Recomputation, verify
from proofserve.protocol.nonces import draw
from proofserve.rounds.records import Workload
from proofserve.wiring.judges import JudgingOptions, judges_of


@dataclass(frozen=True, slots=True)
class Truth:
    """The vectors that a validator compares with, and the digest of their weights if known.

    ``validator`` has other vectors of the checkpoint, None if a node recomputes. Of a model that
    ``is_dense`` it is known that it mixes no experts.
    """

    vectors: Recompute
    weights_digest: str | None
    validator: KernelBank | None = None
    is_dense: bool = False


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """``seed`` draws ``most`` nonces, all for None; ``at_once`` are recomputed in one forward."""

    seed: str
    most: int | None
    at_once: int


def judged(
    claimed: ClaimedArtifacts,
    work: Workload,
    truth: Truth,
    options: JudgingOptions,
    sampling: SampleOptions,
    progress: Progress,
) -> VerdictReport:
    """Recompute a sample of ``claimed`` and judge it.

    Raises LabError for another checkpoint than the prover's, a test that cannot be run here, and
    an incomplete recomputation; ProtocolError for a number out of range; EngineFault.
    """
    claimed.require_digest(truth.weights_digest)
    sample = draw(claimed.nonces, sampling.seed, sampling.most)
    judges = judges_of(options, len(sample), truth.validator)
    ours = Recomputation(truth.vectors, work.scheme.width, sampling.at_once)
    outcome = verify(claimed, sample, ours, judges, progress)
    measured = options.calibration
    return VerdictReport(
        outcome=outcome,
        claimed=claimed,
        seed=sampling.seed,
        rule=options.count_rule(),
        origin=options.origin,
        kernels=measured.honest.names if measured else (),
        alpha=options.alpha,
        beta=options.beta,
    )


def exactly_judged(
    claimed: ClaimedArtifacts,
    work: Workload,
    engine: TrustedEngine,
    options: JudgingOptions,
    sampling: SampleOptions,
    progress: Progress,
) -> VerdictReport:
    """Compare the bits of the first nonces of the sample of ``judged``, as many as clear a node.

    Raises as ``judged``, and NodeError if the engine's server fails.
    """
    claimed.require_digest(engine.weights_digest)
    sample = draw(claimed.nonces, sampling.seed, sampling.most)
    judge = ExactJudge(options.chances(len(sample)), engine.facts, claimed.ran_on)
    unit = f"nonces, by {engine.name}"
    ours = Recomputation(engine.vectors, work.scheme.width, sampling.at_once, unit)
    return VerdictReport(
        outcome=verify(claimed, sample[: judge.needed], ours, [judge], progress),
        claimed=claimed,
        seed=sampling.seed,
        rule=None,
        origin=f"those whose bits are equal to the vectors of {engine.name}",
        kernels=(),
        alpha=options.alpha,
        beta=options.beta,
    )
