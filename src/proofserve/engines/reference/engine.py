"""Proofs by a ``Network``, several nonces in a forward."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from proofserve.engines.reference.errors import CheckpointError
from proofserve.engines.reference.network import Network
from proofserve.engines.reference.routing import seeded_experts
from proofserve.protocol.identity import Block
from proofserve.protocol.scheme import BlockScheme, Scheme
from proofserve.rounds.computation import chunks
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import ProofBatch, Workload


class ReferenceEngine:
    """Recomputes proofs, up to ``forward_batch`` nonces in a forward.

    How many they are may change the last bits of a vector, as another order of summation does.
    """

    def __init__(self, network: Network, forward_batch: int) -> None:
        self._network = network
        self._forward_batch = forward_batch
        # Only the last one is kept: in the distance protocol it has a matrix of 8192 rows.
        self._block: tuple[Scheme, Block, BlockScheme] | None = None

    def compute(self, work: Workload, nonces: Sequence[int]) -> ProofBatch:
        """The proofs of ``nonces``, any number of them; blocks until they are computed.

        Raises:
            EngineFault: a forward failed, or this model cannot do ``work``.
        """
        if work.seq_len > self._network.max_seq_len:
            limit = self._network.max_seq_len
            raise EngineFault(f"seq_len {work.seq_len} exceeds the model's {limit}")
        try:
            rows = [self._forward(work, chunk) for chunk in chunks(nonces, self._forward_batch)]
        except (RuntimeError, ValueError, CheckpointError) as error:
            raise EngineFault(f"the reference forward failed: {error}") from error
        values = np.concatenate([*rows, np.empty((0, work.scheme.width), np.float32)])
        finite = np.isfinite(values).all(axis=1)
        kept = tuple(nonce for nonce, good in zip(nonces, finite, strict=True) if good)
        failed = tuple(nonce for nonce, good in zip(nonces, finite, strict=True) if not good)
        return ProofBatch(kept, values[finite], failed)

    def _forward(self, work: Workload, nonces: Sequence[int]) -> NDArray[np.float32]:
        block = self._block_of(work)
        with seeded_experts(self._network, block, work.seq_len):
            values = self._network.values(block, work.public_key, tuple(nonces), work.seq_len)
        rows: NDArray[np.float32] = values.cpu().numpy()
        return rows

    def _block_of(self, work: Workload) -> BlockScheme:
        if self._block is None or self._block[:2] != (work.scheme, work.block):
            network = self._network
            block = work.scheme.for_block(work.block, network.facts, network.device)
            self._block = work.scheme, work.block, block
        return self._block[2]
