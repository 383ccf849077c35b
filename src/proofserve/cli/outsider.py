"""A prover without a server: the reference engine and a checkpoint, on this machine's CPU.

Its artifacts follow the same recipe as a node's. Those of another checkpoint are what a node would
publish that runs another model than it claims.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from proofserve.lab.client.errors import LabError
from proofserve.lab.client.records import Work
from proofserve.protocol.comparison import Claim
from proofserve.protocol.schemes import scheme
from proofserve.rounds.calls import artifacts_of
from proofserve.rounds.records import Workload

if TYPE_CHECKING:
    from proofserve.engines.reference.network import Network

FORWARD_BATCH = 8


def claims_of_model(
    directory: Path, work: Work, nonces: Sequence[int], at_once: int = FORWARD_BATCH
) -> list[Claim]:
    """The artifacts (scheme ``artifact-v1``) that the checkpoint in ``directory`` gives.

    ``at_once`` nonces go into one forward. Raises CheckpointError and EngineFault.
    """
    # This import takes two seconds, and most commands do not need it.
    from proofserve.engines.reference.network import load  # noqa: PLC0415

    return _claims(load(directory, "bfloat16", "cpu"), work, nonces, at_once)


def claims_of_redrawn_model(directory: Path, work: Work, nonces: Sequence[int]) -> list[Claim]:
    """As ``claims_of_model``, with the matrices of all layers drawn at random.

    Each keeps its mean and deviation: a model of the same shape that was trained otherwise. Raises
    LabError for a checkpoint that the reference engine cannot load.
    """
    import torch  # noqa: PLC0415 - as above

    from proofserve.engines.reference.errors import CheckpointError  # noqa: PLC0415
    from proofserve.engines.reference.network import load  # noqa: PLC0415
    from proofserve.engines.reference.precision import redrawn  # noqa: PLC0415
    from proofserve.engines.reference.variants import with_matrices  # noqa: PLC0415

    generator = torch.Generator().manual_seed(0)
    try:
        network = load(directory, "bfloat16", "cpu")
    except CheckpointError as error:
        raise LabError(str(error)) from error
    other = with_matrices(network, lambda weight: redrawn(weight, generator))
    return _claims(other, work, nonces, FORWARD_BATCH)


def _claims(network: "Network", work: Work, nonces: Sequence[int], at_once: int) -> list[Claim]:
    from proofserve.engines.reference.engine import ReferenceEngine  # noqa: PLC0415 - as above

    engine = ReferenceEngine(network, "outsider", at_once)
    recipe = scheme("artifact-v1", k_dim=work.k_dim)
    order = Workload(recipe, work.block_hash, work.public_key, work.seq_len)
    return [
        Claim(each.nonce, each.vector_b64) for each in artifacts_of(engine.compute(order, nonces))
    ]
