"""Vectors of our own, from a checkpoint or from a node, to hold against somebody else's."""

from collections.abc import Callable, Sequence
from pathlib import Path

from proofserve.lab.client.errors import LabError
from proofserve.lab.client.node_client import NodeClient
from proofserve.lab.client.records import Work
from proofserve.lab.client.vectors import claims_of
from proofserve.protocol.artifact import ArtifactScheme
from proofserve.protocol.comparison import Claim
from proofserve.rounds.calls import NOT_FINITE, artifacts_of
from proofserve.rounds.records import Workload

# The artifacts of nonces, in their order, each of them.
Compute = Callable[[Sequence[int]], list[Claim]]


def by_checkpoint(
    work: Workload, model: Path, dtype: str | None, device: str, forward_batch: int
) -> Compute:
    """Compute ``work`` with the reference engine.

    Raises CheckpointError, and LabError where the extra is not installed. What is returned raises
    EngineFault, and LabError for a nonce whose vector is not finite.
    """
    # Two seconds of imports that a recomputation by a node does without.
    try:
        from proofserve.engines.reference.engine import ReferenceEngine  # noqa: PLC0415
        from proofserve.engines.reference.network import load  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise LabError(f"{error}; install proofserve with its extra `reference`") from error

    engine = ReferenceEngine(load(model, dtype, device), model.name, forward_batch)

    def compute(nonces: Sequence[int]) -> list[Claim]:
        batch = engine.compute(work, nonces)
        for nonce in batch.failed:
            raise LabError(f"nonce {nonce}: {NOT_FINITE}")
        return claims_of(artifacts_of(batch))

    return compute


def by_node(work: Workload, node: NodeClient, model: str) -> Compute:
    """Have ``node``, which serves ``model``, compute ``work``. What is returned raises NodeError.

    The node refuses a scheme that it does not run: numbers of another one would convict anybody.
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
