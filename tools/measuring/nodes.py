"""What measuring programs ask of nodes, and say of a calibration."""

from collections.abc import Sequence

from proofserve.protocol.verdict.comparison import Claim
from proofserve.remote.node_client import NodeClient
from proofserve.remote.records import Work
from proofserve.reports import Progress
from proofserve.rounds.computation import chunks
from proofserve.rounds.records import Workload


def artifacts(
    node: NodeClient, order: Work, nonces: Sequence[int], at_once: int, progress: Progress
) -> list[Claim]:
    """The vectors of ``nonces``, which are asked for in calls of ``at_once``. Raises NodeError."""
    text = f"{order.model}, {order.scheme}: {len(nonces)} nonces"
    calls = progress.over(text, chunks(nonces, at_once))
    return [claim for call in calls for claim in node.artifacts(order, call)]


def about_calibration(model: str, work: Workload, kv_dtype: str = "auto") -> dict[str, object]:
    """For ``verifier.noise.measured_calibration``."""
    return {
        "model": model,
        "shape": None,
        "kv_dtype": kv_dtype,
        "scheme": work.scheme.name,
        "stronger_rng": False,
        "seq_len": work.seq_len,
        "k_dim": work.scheme.width // work.scheme.sequences_per_nonce,
        "block_hash": work.block.hash,
        "public_key": work.public_key,
    }
