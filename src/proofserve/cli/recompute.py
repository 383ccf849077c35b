"""Vectors to compare with: from a checkpoint, a started server, a running node, or a file."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from proofserve.cli.model import NAMES, Checkpoint
from proofserve.cli.servers import ServerOptions, existing_server, serving
from proofserve.cli.session import CommandSession
from proofserve.lab.calibrate.checkpoint_figures import (
    CheckpointFigures,
    HonestRun,
    checkpoint_figures,
)
from proofserve.lab.client.errors import LabError
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.records import Work
from proofserve.lab.client.vectors import claims_of, vectors_of
from proofserve.lab.verify.claimed import (
    ClaimedArtifacts,
    Selection,
    from_file,
    only_source,
    vector_scheme,
)
from proofserve.lab.verify.judges import Vectors
from proofserve.protocol import DEFAULT_SCHEME
from proofserve.protocol.artifact import ArtifactScheme
from proofserve.protocol.identity import Block
from proofserve.protocol.verdict.comparison import Claim
from proofserve.receiver import reader
from proofserve.receiver.database import ReceiverFileError
from proofserve.rounds.calls import NOT_FINITE, artifacts_of, chunks
from proofserve.rounds.records import Workload
from proofserve.wiring.verification.judging import Truth

DTYPES = ("float32", "bfloat16", "float16")
MOST_RANKS = 64
ENGINES = "reference:float32, reference:bfloat16, vllm, vllm:tp2, a node's URL, or a file"
# Nonces in one call and in one step of the progress line.
AT_ONCE = 32

# Returns an artifact for each nonce, in order.
Compute = Callable[[Sequence[int]], list[Claim]]


def read_file(path: Path, wanted: Selection) -> ClaimedArtifacts:
    """The artifacts in a JSON file, or in the SQLite file of ``proofserve receive``.

    Raises LabError naming what is wrong with the file.
    """
    try:
        if not reader.is_database(path):
            return from_file(path, wanted)
        with reader.reading(path) as received:
            if not (counts := received.counts()) and received.rounds():
                raise LabError(f"{path} has roots and no vectors; give --open NODE")
            source = only_source(path, counts, wanted)
            claims = tuple(Claim(nonce, text) for nonce, text in received.of(source))
        return ClaimedArtifacts(*source, tuple(claim.nonce for claim in claims), claims)
    except OSError as error:
        raise LabError(f"cannot read {path}: {error.strerror}") from error
    except ReceiverFileError as error:
        raise LabError(str(error)) from error


def by_checkpoint(
    work: Workload,
    model: Path,
    dtype: str | None,
    device: str,
    forward_batch: int,
    *,
    redrawn: bool = False,
) -> Compute:
    """Load ``model`` to compute ``work`` with the reference engine.

    With ``redrawn`` the matrices of all layers are random, with the mean and deviation of the
    checkpoint's, like those of another model of this shape. Raises LabError if the checkpoint
    cannot be loaded or the extra ``reference`` is not installed. The returned function raises
    EngineFault, and LabError for a nonce whose vector is not finite.
    """
    # These imports take two seconds, and a recomputation by a node does not need them.
    try:
        from proofserve.engines.reference.engine import ReferenceEngine  # noqa: PLC0415
        from proofserve.engines.reference.errors import CheckpointError  # noqa: PLC0415
        from proofserve.engines.reference.network import load  # noqa: PLC0415
        from proofserve.engines.reference.variants import with_redrawn_matrices  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise LabError(f"{error}; install proofserve with its extra `reference`") from error

    try:
        network = load(model, dtype, device)
    except CheckpointError as error:
        raise LabError(str(error)) from error
    if redrawn:
        network = with_redrawn_matrices(network)
    engine = ReferenceEngine(network, forward_batch)

    def compute(nonces: Sequence[int]) -> list[Claim]:
        batch = engine.compute(work, nonces)
        for nonce in batch.failed:
            raise LabError(f"nonce {nonce}: {NOT_FINITE}")
        return claims_of(artifacts_of(batch))

    return compute


def claims_of_model(
    directory: Path,
    work: Work,
    nonces: Sequence[int],
    *,
    forward_batch: int = 8,
    redrawn: bool = False,
) -> list[Claim]:
    """The artifacts that a checkpoint gives for ``work``, in bfloat16 on the CPU.

    With another checkpoint than the server's, or with ``redrawn`` matrices, these are the artifacts
    of a node that does not run the model it claims. Raises as ``by_checkpoint``.
    """
    scheme = vector_scheme(work.scheme or DEFAULT_SCHEME, work.k_dim, work.stronger_rng)
    block = Block(work.block_hash, work.block_height)
    workload = Workload(scheme, block, work.public_key, work.seq_len)
    compute = by_checkpoint(workload, directory, "bfloat16", "cpu", forward_batch, redrawn=redrawn)
    return compute(nonces)


def truth_of_checkpoint(
    work: Workload,
    model: Path,
    dtype: str | None,
    device: str,
    forward_batch: int,
    suspects: tuple[Path, ...],
) -> Truth:
    """Load ``model``, and ``suspects`` when they are needed. Raises as ``by_checkpoint``."""
    try:
        from proofserve.wiring.validator import CheckpointValidator, ValidatorSetup, proofs_of  # noqa: PLC0415 - as above
    except ModuleNotFoundError as error:
        raise LabError(f"{error}; install proofserve with its extra `reference`") from error
    setup = ValidatorSetup(model, dtype, device, suspects)
    validator = CheckpointValidator(setup, proofs_of(work, forward_batch))
    return Truth(validator.truth, validator.weights_digest, validator)


def truth_of_node(node: NodeClient, work: Workload) -> Truth:
    """Let ``node`` recompute. Raises NodeError, as the function that it returns."""
    compute = by_node(work, node, node.models()[0])

    def vectors(nonces: Sequence[int]) -> Vectors:
        return vectors_of(compute(nonces), work.scheme.width)

    return Truth(vectors, node.weights_digest())


def by_node(work: Workload, node: NodeClient, model: str) -> Compute:
    """Let ``node``, which serves ``model``, compute ``work``; the function raises NodeError.

    The node refuses other schemes than its own, because their vectors would convict every prover.
    """
    request = Work(
        model,
        block_hash=work.block.hash,
        block_height=work.block.height,
        public_key=work.public_key,
        seq_len=work.seq_len,
        # Of a sketch this is half the width: an artifact has both twins' sketches.
        k_dim=work.scheme.width // work.scheme.sequences_per_nonce,
        scheme=work.scheme.name,
        stronger_rng=isinstance(work.scheme, ArtifactScheme) and work.scheme.stronger_rng,
    )
    return lambda nonces: claims_of(node.artifacts(request, nonces))


@dataclass(frozen=True, slots=True)
class ComparisonTask:
    """What both compared engines compute, and how engines of this machine run.

    ``api_key`` is for a running node that needs one.
    """

    work: Workload
    nonces: Sequence[int]
    model: Checkpoint | None
    device: str
    forward_batch: int
    api_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class ComparedEngine:
    """One of the two engines whose vectors ``calibrate noise`` compares, by its ``name``.

    Plain transformers in ``dtype``, a started vLLM server on ``ranks`` devices, the node ``url``,
    or the artifacts ``claimed`` in a file; then the other engine computes the nonces of the file.
    All other fields are None.
    """

    name: str
    dtype: str | None = None
    ranks: int | None = None
    url: str | None = None
    claimed: ClaimedArtifacts | None = None

    @property
    def needs_model(self) -> bool:
        return self.dtype is not None or self.ranks is not None

    def artifacts(self, task: ComparisonTask, session: CommandSession) -> list[Claim]:
        """An artifact for each nonce, in order. Raises the errors that ``open_session`` prints."""
        if self.claimed is not None:
            wanted = set(task.nonces)
            return [claim for claim in self.claimed.claims if claim.nonce in wanted]
        with self._running(task, session) as compute:
            calls = chunks(task.nonces, AT_ONCE)
            session.line.step(f"{self.name}: {len(task.nonces)} nonces", len(calls))
            claims: list[Claim] = []
            for nonces in calls:
                claims += compute(nonces)
                session.line.advance()
            return claims

    @contextmanager
    def _running(self, task: ComparisonTask, session: CommandSession) -> Iterator[Compute]:
        work, model = task.work, task.model
        if self.url is not None:
            with existing_server(self.url, task.api_key, session) as node:
                yield by_node(work, node, node.models()[0])
        elif model is None:
            raise LabError(f"{self.name} needs a model: {', '.join(NAMES)}, or a folder")
        elif self.ranks is not None:
            options = ServerOptions(model.folder, model.name, task.forward_batch)
            options = replace(options, scheme=work.scheme.name, ranks=self.ranks)
            with serving(options, session) as node:
                yield by_node(work, node, model.name)
        else:
            session.line.step(f"loading {model.name} as {self.dtype}")
            with session.interrupts.allowed():
                yield by_checkpoint(work, model.folder, self.dtype, task.device, task.forward_batch)


def figures_of_checkpoint(
    task: ComparisonTask,
    engines: Sequence[ComparedEngine],
    computed: Sequence[Sequence[Claim]],
    nonces: int,
    suspects: tuple[Path, ...],
    session: CommandSession,
) -> CheckpointFigures:
    """As ``checkpoint_figures`` for the engine beside a float32 reference engine.

    None without such a pair or the checkpoint. Raises as ``by_checkpoint`` and EngineFault.
    """
    exact = [engine.dtype == "float32" for engine in engines]
    if task.model is None or sum(exact) != 1:
        return CheckpointFigures(None, {})
    truth, honest = (
        vectors_of(computed[exact.index(e)], task.work.scheme.width) for e in (True, False)
    )
    validator = truth_of_checkpoint(
        task.work, task.model.folder, "float32", task.device, task.forward_batch, suspects
    ).validator
    if validator is None:
        raise AssertionError("a checkpoint's truth has a validator")
    run = HonestRun(honest, truth, other_kernels=engines[exact.index(False)].dtype is None)
    return checkpoint_figures(validator, run, nonces, session.line)


def engine_named(name: str) -> ComparedEngine:
    """The engine called ``name``. Raises LabError, also for a file without artifacts."""
    kind, _, detail = name.partition(":")
    if name.startswith(("http://", "https://")):
        return ComparedEngine(name, url=name)
    if kind == "reference" and detail in DTYPES:
        return ComparedEngine(name, dtype=detail)
    ranks = "1" if name == "vllm" else detail.removeprefix("tp")
    if name == "vllm" or (name.startswith("vllm:tp") and ranks.isdecimal()):
        if not 1 <= int(ranks) <= MOST_RANKS:
            raise LabError(f"{name}: {ranks} ranks are outside 1..{MOST_RANKS}")
        return ComparedEngine(name, ranks=int(ranks))
    if not Path(name).is_file():
        raise LabError(f"{name!r} is not an engine and not a file; choose from {ENGINES}")
    return ComparedEngine(name, claimed=read_file(Path(name), Selection()))
