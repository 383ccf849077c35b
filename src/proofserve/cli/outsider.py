"""A prover with no server at all: the reference engine and a checkpoint, on this machine's CPU.

What it computes is real, and by the same recipe; with another checkpoint it is the work of a node
that runs another model than it says.
"""

from collections.abc import Sequence
from pathlib import Path

from proofserve.lab.client.records import Work
from proofserve.protocol.comparison import Claim
from proofserve.protocol.schemes import scheme
from proofserve.rounds.calls import artifacts_of
from proofserve.rounds.records import Workload


def claims_of_model(
    directory: Path, work: Work, nonces: Sequence[int], at_once: int = 8
) -> list[Claim]:
    """The artifacts (scheme ``artifact-v1``) that the checkpoint in ``directory`` gives.

    ``at_once`` nonces go into one forward. Raises CheckpointError and EngineFault.
    """
    # Two seconds of imports that few commands need.
    from proofserve.engines.reference.engine import ReferenceEngine  # noqa: PLC0415
    from proofserve.engines.reference.network import load  # noqa: PLC0415

    engine = ReferenceEngine(load(directory, "bfloat16", "cpu"), directory.name, at_once)
    recipe = scheme("artifact-v1", k_dim=work.k_dim)
    order = Workload(recipe, work.block_hash, work.public_key, work.seq_len)
    batch = engine.compute(order, nonces)
    return [Claim(each.nonce, each.vector_b64) for each in artifacts_of(batch)]
