"""Vectors to compare with: from a checkpoint, a started server, a running node, or a file."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from proofserve.cli.model import Checkpoint
from proofserve.cli.servers import ServerOptions, existing_server, serving
from proofserve.cli.session import CommandSession
from proofserve.cli.validator.plans import tell_plan_of_verdict
from proofserve.client.checkpoint import proof_validator, reference_extra, validator_setup
from proofserve.engines.checkpoints import weights_digest
from proofserve.protocol.sketch import cost_of_few_values
from proofserve.protocol.verdict.comparison import Claim
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work, vectors_of
from proofserve.reports import ReportedError
from proofserve.rounds.computation import NOT_FINITE, artifacts_of, chunks
from proofserve.rounds.records import Workload
from proofserve.verifier.calibration_file import KernelFacts, checkpoint_shape
from proofserve.verifier.claims import ClaimedArtifacts, Selection, kernel_facts, read_file
from proofserve.verifier.judging import (
    ChosenTests,
    JudgingOptions,
    VerdictReport,
    exactly_judged,
    judged,
)
from proofserve.verifier.nodes.beside_checkpoint import TrustedNodes
from proofserve.verifier.orders import order_for, workload_of
from proofserve.verifier.verification import Truth, leaves_open

MOST_RANKS = 64
ENGINES = "vllm, vllm:tp2, a node's URL, or a file of `calibrate noise --save`"
# Nonces in one call and in one step of the progress line.
AT_ONCE = 32

# What an engine ran on, and an artifact for each nonce.
EngineRun = tuple[KernelFacts, Sequence[Claim]]
# Returns an artifact for each nonce, in order.
Compute = Callable[[Sequence[int]], list[Claim]]


def claims_of_model(
    directory: Path,
    work: Work,
    nonces: Sequence[int],
    *,
    forward_batch: int = 8,
    redrawn: bool = False,
) -> list[Claim]:
    """The artifacts that a node in bfloat16 gives for ``work``, whose kernels are emulated here.

    With ``redrawn`` the matrices of all layers are random, with the mean and deviation of the
    checkpoint's, like those of another model of this shape. Raises ReportedError for a checkpoint
    that cannot be loaded, a vector that is not finite and a missing extra ``reference``, and
    EngineFault.
    """
    # These imports take two seconds, and a recomputation by a node does not need them.
    with reference_extra():
        import torch  # noqa: PLC0415

        from proofserve.engines.errors import CheckpointError  # noqa: PLC0415
        from proofserve.engines.reference.engine import ReferenceEngine  # noqa: PLC0415
        from proofserve.engines.reference.kernels import own_profile  # noqa: PLC0415
        from proofserve.engines.reference.network import load, with_kernels  # noqa: PLC0415
        from proofserve.engines.reference.variants import with_redrawn_matrices  # noqa: PLC0415
    try:
        network = load(directory, "float32", "cpu")
    except CheckpointError as error:
        raise ReportedError(str(error)) from error
    network = with_redrawn_matrices(network) if redrawn else network
    if (kernels := own_profile(torch.bfloat16)) is not None:
        network = with_kernels(network, kernels)
    batch = ReferenceEngine(forward_batch).compute(workload_of(work), network, nonces)
    for nonce in batch.failed:
        raise ReportedError(f"nonce {nonce}: {NOT_FINITE}")
    return [Claim(each.nonce, each.vector_b64) for each in artifacts_of(batch)]


def warn_of_few_values(work: Workload, session: CommandSession) -> None:
    if (warning := cost_of_few_values(work.scheme)) is not None:
        session.tell(warning, "yellow")


def truth_of_node(node: NodeClient, work: Workload, at_once: int) -> Truth:
    """Let ``node`` recompute, ``at_once`` nonces in a call. Raises NodeError, as its vectors."""
    compute, width = by_node(work, node), work.scheme.width
    digest = node.weights_digest()
    return Truth(lambda nonces: vectors_of(compute(nonces), width), width, at_once, digest)


def by_node(work: Workload, node: NodeClient) -> Compute:
    """Let ``node`` compute ``work`` with its first model; the function raises NodeError.

    The node refuses other schemes than its own, because their vectors would convict every prover.
    """
    request = order_for(work, str(node.models()[0]))
    return lambda nonces: node.artifacts(request, nonces)


@dataclass(frozen=True, slots=True)
class ComparisonTask:
    """What engines compute, how many nonces at a time, and the key of a node that needs one."""

    work: Workload
    nonces: Sequence[int]
    model: Checkpoint
    forward_batch: int
    api_key: str | None = field(default=None, repr=False)


def saved_run(name: str) -> ClaimedArtifacts | None:
    """What the engine ``name`` computed, if that is a file; None for a vLLM or a node's URL.

    Raises ReportedError for any other name, and for a file without artifacts.
    """
    if name.startswith(("http://", "https://")) or vllm_ranks(name) is not None:
        return None
    if not Path(name).is_file():
        raise ReportedError(f"{name!r} is not an engine and not a file; choose from {ENGINES}")
    return read_file(Path(name), Selection())


def run_engine(
    name: str, saved: ClaimedArtifacts | None, task: ComparisonTask, session: CommandSession
) -> EngineRun:
    """What the engine ``name`` computes, or has ``saved``; raises what ``open_session`` prints."""
    if saved is not None:
        wanted = set(task.nonces)
        kept = [claim for claim in saved.claims if claim.nonce in wanted]
        facts = kernel_facts(name, {}) if saved.ran_on is None else saved.ran_on
        return KernelFacts.model_validate(facts), kept
    if (ranks := vllm_ranks(name)) is None:
        served = existing_server(name, task.api_key, session)
    else:
        options = ServerOptions(task.model.folder, task.model.name, task.forward_batch)
        served = serving(replace(options, scheme=task.work.scheme.name, ranks=ranks), session)
    with served as node:
        facts = kernel_facts("a node", node.kernels())
        compute = by_node(task.work, node)
        calls = chunks(task.nonces, AT_ONCE)
        session.line.step(f"{name}: {len(task.nonces)} nonces", len(calls))
        claims: list[Claim] = []
        for nonces in calls:
            claims += compute(nonces)
            session.line.advance()
    return KernelFacts.model_validate(facts), claims


def vllm_ranks(name: str) -> int | None:
    """On how many devices to start a vLLM, if ``name`` means one.

    Raises ReportedError for too many.
    """
    ranks = "1" if name == "vllm" else name.removeprefix("vllm:tp")
    if ranks == name or not ranks.isdecimal():
        return None
    if not 1 <= int(ranks) <= MOST_RANKS:
        raise ReportedError(f"{name}: {ranks} ranks are outside 1..{MOST_RANKS}")
    return int(ranks)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What recomputes for ``verify``: the checkpoint ``model``, the node ``url``, or both.

    ``engine`` names a vLLM that ``verify`` starts with the checkpoint, in place of a node;
    ``nodes`` are trusted beside it. Raises ReportedError, which says what to give, for other
    choices.
    """

    model: Path | None
    url: str | None
    engine: str | None
    device: str
    forward_batch: int
    suspects: Sequence[Path] | None
    api_key: str | None = field(default=None, repr=False)
    nodes: TrustedNodes | None = None

    def __post_init__(self) -> None:
        if self.model is None and self.url is None:
            raise ReportedError("give --model CHECKPOINT, --recompute-url NODE, or both")
        if self.engine is None:
            return
        if self.model is None or self.url is not None:
            raise ReportedError(
                "--engine serves the checkpoint of --model; leave --recompute-url out"
            )
        if vllm_ranks(self.engine) is None:
            raise ReportedError(f"--engine {self.engine}: give vllm, or vllm:tp2 for two ranks")

    @property
    def trusts_one(self) -> bool:
        """Whether there is an engine whose bits count."""
        return self.url is not None or self.engine is not None

    def report(
        self,
        claimed: ClaimedArtifacts,
        work: Workload,
        tests: ChosenTests,
        options: JudgingOptions,
        sample: tuple[str, int | None],
        session: CommandSession,
    ) -> VerdictReport:
        """The verdict: by the engine's bits alone, or by other tests where they decide nothing.

        ``sample`` is the seed that draws it, and how many nonces it has at most. Raises
        ReportedError for another checkpoint than the prover's and for tests that cannot be run, and
        the errors of servers, nodes, checkpoints and engines.
        """
        if self.model is not None and self.trusts_one and not tests.exact:
            raise ReportedError(
                "--test: only exact asks an engine beside --model; add --test exact"
            )
        # The source need not say its scheme.
        claimed, exact = replace(claimed, scheme=work.scheme.name), None
        if tests.exact:
            # The server stops before a checkpoint is loaded: a card may not have room for both.
            with self._node(work, options, session) as node:
                engine = self._trusted(node, work)
                exact = exactly_judged(claimed, engine, options, *sample, session.line)
            if not (tests.judges and leaves_open(exact.outcome)):
                return exact
        with session.interrupts.allowed(), ExitStack() as stack:
            if self.model is not None:
                self.plan(claimed, work, options, sample[1], session)
            truth = self._truth(work, options, session, stack)
            if self.nodes is not None:
                order = order_for(work)
                return self.nodes.report(claimed, order, options, sample, session.line, truth)
            others = judged(claimed, truth, options, *sample, session.line)
        return others.after(exact) if exact else others

    def plan(
        self,
        claimed: ClaimedArtifacts,
        work: Workload,
        options: JudgingOptions,
        most: int | None,
        session: CommandSession,
    ) -> None:
        """Tell what vectors of up to ``most`` nonces cost; None for all. Raises as ``report``."""
        if self.model is None:
            raise ReportedError("--plan: it is about a checkpoint; give --model")
        warn_of_few_values(work, session)
        setup = validator_setup(self.model, self.device, self.suspects, options.calibration)
        sample = min(most or len(claimed.nonces), len(claimed.nonces))
        about = sample, claimed.ran_on or {}
        tell_plan_of_verdict(setup, work, options, about, self.forward_batch, session)

    def _trusted(self, node: NodeClient, work: Workload) -> Truth:
        truth, name = truth_of_node(node, work, self.forward_batch), self.engine or node.url
        if self.model is not None and truth.weights_digest is not None:
            served, ours = truth.weights_digest, weights_digest(self.model)
            if served != ours:
                raise ReportedError(
                    f"weights_digest: {name} serves {served}, {self.model} has {ours}"
                )
        return replace(truth, name=name, facts=kernel_facts(name, node.kernels()))

    def _truth(
        self, work: Workload, options: JudgingOptions, session: CommandSession, stack: ExitStack
    ) -> Truth:
        """What the other tests compare with: the checkpoint's vectors if there is one."""
        if self.model is not None:
            session.line.step(f"loading {self.model}")
            setup = validator_setup(self.model, self.device, self.suspects, options.calibration)
            loaded = proof_validator(setup, work, self.forward_batch, session.line.layer)
            truth = loaded.as_truth(work.scheme.width, self.forward_batch)
            models, shape = [self.model.name], checkpoint_shape(self.model)
        else:
            session.line.step(f"asking {self.url}")
            node = stack.enter_context(NodeClient(str(self.url), self.api_key))
            truth = truth_of_node(node, work, self.forward_batch)
            models, shape = node.models(), None
        if measured := options.calibration:
            measured.require(work, models, shape, truth.weights_digest, truth.is_dense)
        return truth

    def _node(
        self, work: Workload, options: JudgingOptions, session: CommandSession
    ) -> AbstractContextManager[NodeClient]:
        """A server that is started here has the dtype of the calibration, or vLLM's own choice."""
        if self.model is None or self.engine is None:
            session.line.step(f"asking {self.url}")
            return existing_server(str(self.url), self.api_key, session)
        served = ServerOptions(
            self.model,
            self.model.name,
            self.forward_batch,
            scheme=work.scheme.name,
            ranks=vllm_ranks(self.engine) or 1,
            dtype=options.calibration.served_dtype if options.calibration else "auto",
        )
        return serving(served, session)
