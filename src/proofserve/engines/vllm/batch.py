"""One forward of the deployed shape, from the engine core's side."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from proofserve.engines.vllm import core_messages
from proofserve.engines.vllm.core_port import CorePort
from proofserve.engines.vllm.lease import Lease
from proofserve.protocol.nonces import pad


@dataclass(frozen=True, slots=True)
class Batch:
    """``count`` nonces were taken; ``rows`` float32 [count - len(failed), width] in order."""

    count: int
    rows: NDArray[np.float32]
    failed: list[int]


def run_batch(core: CorePort, lease: Lease, call: core_messages.ProveCall, start: int) -> Batch:
    """Prove as many of ``call.nonces[start:]`` as one forward holds, on all workers.

    Raises the error that a worker raised.
    """
    wanted = call.nonces[start : start + lease.sequences]
    padded = replace(call, nonces=pad(wanted, lease.sequences))
    reply = core.run_forward(core_messages.Forward(padded, lease.tables, lease.block_sizes))
    failed = [nonce for nonce in reply["failed"] if nonce >= 0]
    # Padding nonces follow the wanted ones, so the wanted ones' rows come first.
    rows = core_messages.values_of(reply)[: len(wanted) - len(failed)]
    return Batch(len(wanted), rows, failed)
