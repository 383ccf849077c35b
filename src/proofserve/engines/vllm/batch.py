"""One forward of the deployed shape, from the engine core's side."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proofserve.engines.vllm import compat, wire
from proofserve.engines.vllm.lease import LeaseBook
from proofserve.engines.vllm.worker import prove
from proofserve.protocol.nonces import pad


@dataclass(frozen=True, slots=True)
class Batch:
    """``count`` nonces were taken; ``rows`` float32 [count - len(failed), width] in order."""

    count: int
    rows: NDArray[np.float32]
    failed: list[int]


class BatchRunner:
    """Fills forwards up to their fixed shape and runs them on all workers."""

    def __init__(self, engine: Any, leases: LeaseBook) -> None:
        self._engine = engine
        self._leases = leases

    def run(self, call: wire.ProveCall, start: int) -> Batch:
        """Prove as many of ``call.nonces[start:]`` as one forward holds.

        Raises LeaseRefused, or whatever the workers raised.
        """
        lease = self._leases.get(call.lease, call.seq_len, time.monotonic())
        wanted = call.nonces[start : start + lease.sequences]
        forward = wire.Forward(
            scheme=call.scheme,
            block_hash=call.block_hash,
            public_key=call.public_key,
            seq_len=call.seq_len,
            nonces=pad(wanted, lease.sequences),
            blocks=lease.tables,
            block_sizes=lease.block_sizes,
        )
        replies = compat.run_on_workers(self._engine, prove, forward)
        reply = next(reply for reply in replies if reply is not None)
        failed = [nonce for nonce in reply["failed"] if nonce >= 0]
        # Dummies trail the wanted nonces, so the wanted ones' rows come first.
        rows = wire.values_of(reply)[: len(wanted) - len(failed)]
        return Batch(len(wanted), rows, failed)
