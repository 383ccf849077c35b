"""One forward of the deployed shape, from the engine core's side."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from proofserve.engines.vllm import core_messages
from proofserve.engines.vllm.core_port import CorePort
from proofserve.engines.vllm.lease import Lease, LeaseRefused
from proofserve.protocol.nonces import pad


@dataclass(frozen=True, slots=True)
class Batch:
    """``count`` nonces were taken; ``rows`` float32 [count - len(failed), width] in order."""

    count: int
    rows: NDArray[np.float32]
    failed: list[int]


def run_batch(core: CorePort, lease: Lease, call: core_messages.ProveCall, start: int) -> Batch:
    """Prove as many of ``call.nonces[start:]`` as one forward holds, on all workers.

    Raises LeaseRefused if a forward is too small for one nonce, or the error that a worker raised.
    """
    size = lease.sequences // call.sequences_per_nonce
    if not size:
        raise LeaseRefused(
            f"a step of the engine holds {lease.sequences} sequence of {call.seq_len} tokens, "
            f"and a nonce has {call.sequences_per_nonce}. Raise --max-num-batched-tokens or "
            "--poc-forward-batch."
        )
    wanted = call.nonces[start : start + size]
    padded = replace(call, nonces=pad(wanted, size))
    # With an odd number of sequences the last one's blocks stay unused.
    used = size * call.sequences_per_nonce
    tables = tuple(group[:used] for group in lease.tables)
    reply = core.run_forward(core_messages.Forward(padded, tables, lease.block_sizes))
    failed = [nonce for nonce in reply["failed"] if nonce >= 0]
    # Padding nonces follow the wanted ones, so the wanted ones' rows come first.
    rows = core_messages.values_of(reply)[: len(wanted) - len(failed)]
    return Batch(len(wanted), rows, failed)
