"""One forward of the deployed shape, from the engine core's side."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proofserve.engines.vllm import core_messages
from proofserve.engines.vllm.core_port import CorePort
from proofserve.engines.vllm.lease import LeaseTable
from proofserve.protocol.nonces import pad


@dataclass(frozen=True, slots=True)
class Batch:
    """``count`` nonces were taken; ``rows`` float32 [count - len(failed), width] in order."""

    count: int
    rows: NDArray[np.float32]
    failed: list[int]


class BatchRunner:
    """Fills forwards up to their fixed shape and runs them on all workers.

    ``now``: the monotonic clock, in seconds.
    """

    def __init__(self, core: CorePort, leases: LeaseTable, now: Callable[[], float]) -> None:
        self._core = core
        self._leases = leases
        self._now = now

    def run(self, call: core_messages.ProveCall, start: int) -> Batch:
        """Prove as many of ``call.nonces[start:]`` as one forward holds.

        Raises LeaseRefused, or the error that a worker raised.
        """
        lease = self._leases.get(call.lease, call.seq_len, self._now())
        wanted = call.nonces[start : start + lease.sequences]
        forward = core_messages.Forward(
            scheme=call.scheme,
            block_hash=call.block_hash,
            public_key=call.public_key,
            seq_len=call.seq_len,
            nonces=pad(wanted, lease.sequences),
            blocks=lease.tables,
            block_sizes=lease.block_sizes,
        )
        reply = self._core.run_forward(forward)
        failed = [nonce for nonce in reply["failed"] if nonce >= 0]
        # Padding nonces follow the wanted ones, so the wanted ones' rows come first.
        rows = core_messages.values_of(reply)[: len(wanted) - len(failed)]
        return Batch(len(wanted), rows, failed)
