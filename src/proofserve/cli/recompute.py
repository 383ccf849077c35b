"""Vectors of our own: from a checkpoint, a server that we start, a running node, or a file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from proofserve.cli.model import Checkpoint
from proofserve.cli.servers import ServerOptions, existing_server, serving
from proofserve.cli.session import CommandSession
from proofserve.lab.client.errors import LabError
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.records import Work
from proofserve.lab.client.vectors import claims_of
from proofserve.lab.verify.claimed import (
    ClaimedArtifacts,
    Selection,
    from_file,
    from_pairs,
    only_source,
)
from proofserve.protocol.artifact import ArtifactScheme
from proofserve.protocol.comparison import Claim
from proofserve.receiver import reader
from proofserve.receiver.database import ReceiverFileError
from proofserve.rounds.calls import NOT_FINITE, artifacts_of, chunks
from proofserve.rounds.records import Workload

DTYPES = ("float32", "bfloat16", "float16")
MOST_RANKS = 64
ENGINES = "reference:float32, reference:bfloat16, vllm, vllm:tp2, a node's URL, or a file"
# Nonces of one call, and of one step of progress.
AT_ONCE = 32

# Gives an artifact for each of the nonces, in their order.
Compute = Callable[[Sequence[int]], list[Claim]]


def read_file(path: Path, wanted: Selection) -> ClaimedArtifacts:
    """The artifacts in a JSON file, or in the SQLite file of ``proofserve receive``.

    Raises LabError naming what is wrong with the file.
    """
    try:
        if not reader.is_database(path):
            return from_file(path, wanted)
        with reader.reading(path) as received:
            source = only_source(path, received.counts(), wanted)
            return from_pairs(source, received.of(source))
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

    With ``redrawn`` the matrices of all layers are drawn at random with the mean and deviation of
    the checkpoint's: a model of the same shape that was trained otherwise. Raises LabError if the
    checkpoint cannot be loaded or the extra ``reference`` is not installed. The function that is
    returned raises EngineFault, and LabError for a nonce whose vector is not finite.
    """
    # Two seconds of imports that a recomputation by a node does without.
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
    """The artifacts of scheme ``artifact-v1`` that a checkpoint gives, in bfloat16 on the CPU.

    With another checkpoint than the server's, or with ``redrawn`` matrices, they are what a node
    computes that runs another model than it claims. Raises as ``by_checkpoint``.
    """
    scheme = ArtifactScheme(k_dim=work.k_dim)
    workload = Workload(scheme, work.block_hash, work.public_key, work.seq_len)
    compute = by_checkpoint(workload, directory, "bfloat16", "cpu", forward_batch, redrawn=redrawn)
    return compute(nonces)


def by_node(work: Workload, node: NodeClient, model: str) -> Compute:
    """Let ``node``, which serves ``model``, compute ``work``; the function raises NodeError.

    The node refuses a scheme that it does not run: vectors of another scheme would convict every
    prover.
    """
    order = Work(
        model,
        block_hash=work.block_hash,
        public_key=work.public_key,
        seq_len=work.seq_len,
        k_dim=work.scheme.width,
        scheme=work.scheme.name,
        stronger_rng=isinstance(work.scheme, ArtifactScheme) and work.scheme.stronger_rng,
    )
    return lambda nonces: claims_of(node.artifacts(order, nonces))


@dataclass(frozen=True, slots=True)
class ComparisonTask:
    """What both compared engines compute, and for engines that we run: by which model and how.

    ``api_key`` is for a node that runs already and asks for one.
    """

    work: Workload
    nonces: Sequence[int]
    model: Checkpoint | None
    device: str
    forward_batch: int
    api_key: str | None = field(default=None, repr=False)

    def checkpoint(self, engine: str) -> Checkpoint:
        """The model. Raises LabError if none was named."""
        if self.model is None:
            raise LabError(f"{engine} needs a model; name one of ours, or a checkpoint's folder")
        return self.model


class ComparedEngine(Protocol):
    """One of the two engines whose vectors ``calibrate noise`` compares."""

    @property
    def name(self) -> str:
        """As the command line names it."""
        ...

    @property
    def needs_model(self) -> bool:
        """Whether it computes from a checkpoint on this machine."""
        ...

    def artifacts(self, task: ComparisonTask, session: CommandSession) -> list[Claim]:
        """An artifact for each nonce, in order. Raises the errors that ``open_session`` prints."""
        ...


@dataclass(frozen=True, slots=True)
class ComparedReference:
    """Plain transformers with weights and arithmetic of ``dtype``."""

    dtype: str
    needs_model = True

    @property
    def name(self) -> str:
        """``reference:DTYPE``."""
        return f"reference:{self.dtype}"

    def artifacts(self, task: ComparisonTask, session: CommandSession) -> list[Claim]:
        """Computed in this process."""
        model = task.checkpoint(self.name)
        session.line.step(f"loading {model.name} as {self.dtype}")
        with session.interrupts.allowed():
            compute = by_checkpoint(
                task.work, model.folder, self.dtype, task.device, task.forward_batch
            )
            return _in_steps(self.name, compute, task, session)


@dataclass(frozen=True, slots=True)
class ComparedVllm:
    """A vLLM server on ``ranks`` devices, started as ``check`` and ``bench`` start it."""

    ranks: int
    needs_model = True

    @property
    def name(self) -> str:
        """``vllm``, or ``vllm:tpN`` on several ranks."""
        return "vllm" if self.ranks == 1 else f"vllm:tp{self.ranks}"

    def artifacts(self, task: ComparisonTask, session: CommandSession) -> list[Claim]:
        """Computed by a server that ends with this call."""
        model = task.checkpoint(self.name)
        deployment = ServerOptions(
            model.folder,
            model.name,
            task.forward_batch,
            scheme=task.work.scheme.name,
            ranks=self.ranks,
        )
        with serving(deployment, session) as node:
            return _in_steps(self.name, by_node(task.work, node, model.name), task, session)


@dataclass(frozen=True, slots=True)
class ComparedNode:
    """A server that runs already; ``name`` is its URL."""

    name: str
    needs_model = False

    def artifacts(self, task: ComparisonTask, session: CommandSession) -> list[Claim]:
        """Computed by the node's ``/generate``."""
        with existing_server(self.name, task.api_key, session) as node:
            compute = by_node(task.work, node, node.models()[0])
            return _in_steps(self.name, compute, task, session)


@dataclass(frozen=True, slots=True)
class ComparedFile:
    """What another machine computed, in the file ``name``; it decides what the other computes."""

    name: str
    claimed: ClaimedArtifacts
    needs_model = False

    def artifacts(
        self,
        task: ComparisonTask,
        session: CommandSession,  # noqa: ARG002 - nothing to do
    ) -> list[Claim]:
        """Those of the task's nonces."""
        wanted = set(task.nonces)
        return [claim for claim in self.claimed.claims if claim.nonce in wanted]


def engine_named(name: str) -> ComparedEngine:
    """The engine that ``name`` stands for. Raises LabError, also for a file without artifacts."""
    kind, _, detail = name.partition(":")
    if name.startswith(("http://", "https://")):
        return ComparedNode(name)
    if kind == "reference" and detail in DTYPES:
        return ComparedReference(detail)
    if name == "vllm":
        return ComparedVllm(1)
    ranks = detail.removeprefix("tp")
    if kind == "vllm" and detail.startswith("tp") and ranks.isdecimal():
        if not 1 <= int(ranks) <= MOST_RANKS:
            raise LabError(f"{name}: {ranks} ranks are outside 1..{MOST_RANKS}")
        return ComparedVllm(int(ranks))
    if not Path(name).is_file():
        raise LabError(f"{name!r} is no engine and no file; choose from {ENGINES}")
    return ComparedFile(name, read_file(Path(name), Selection()))


def _in_steps(
    name: str, compute: Compute, task: ComparisonTask, session: CommandSession
) -> list[Claim]:
    calls = chunks(task.nonces, AT_ONCE)
    session.line.step(f"{name}: {len(task.nonces)} nonces", len(calls))
    claims: list[Claim] = []
    for nonces in calls:
        claims += compute(nonces)
        session.line.advance()
    return claims
