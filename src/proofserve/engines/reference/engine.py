"""The engine port of rounds over a ``Network``: every forward of one shape, one at a time."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from proofserve.engines.reference.network import Network
from proofserve.protocol.nonces import pad
from proofserve.protocol.scheme import BlockScheme, Scheme
from proofserve.rounds.calls import chunks
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import EngineInfo, ProofBatch, Workload
from proofserve.rounds.status import EngineGauges

# A block keeps what all its nonces share, 8192 rows in the distance protocol.
_BLOCKS_KEPT = 4


class ReferenceEngine:
    """Recomputes proofs; ``forward_batch`` nonces per forward, filled up with dummies.

    The shape of a forward is always the same, so that a vector does not depend on the other
    nonces of its forward.
    """

    def __init__(self, network: Network, name: str, forward_batch: int) -> None:
        self._network = network
        self._name = name
        self._forward_batch = forward_batch
        self._computing = threading.Lock()
        self._blocks: OrderedDict[tuple[Scheme, str], BlockScheme] = OrderedDict()

    @property
    def engine_info(self) -> EngineInfo:
        """The loaded model and the versions that compute it."""
        return EngineInfo(
            model_names=(self._name,),
            hidden_size=self._network.hidden_size,
            max_seq_len=self._network.max_seq_len,
            versions={name: version(name) for name in ("torch", "transformers")},
        )

    def session(self, work: Workload) -> AbstractAsyncContextManager["ReferenceSession"]:
        """See ``rounds.ports.ProofEngine.session``: there is nothing to lease."""
        return self._session(work)

    async def gauges(self) -> EngineGauges:
        """Zeros: this engine serves no chat."""
        return EngineGauges(0, 0.0, 0.0, 0.0, 0.0, 0.0, (), 0, 0, 0)

    def compute(self, work: Workload, nonces: Sequence[int]) -> ProofBatch:
        """The proofs of ``nonces``, any number of them; blocks until they are computed.

        Raises:
            EngineFault: a forward failed, or this model cannot do ``work``.
        """
        if work.seq_len > self._network.max_seq_len:
            raise EngineFault(
                f"seq_len {work.seq_len} exceeds the model's {self._network.max_seq_len}"
            )
        with self._computing:
            try:
                rows = [self._forward(work, chunk) for chunk in chunks(nonces, self._forward_batch)]
            except (RuntimeError, ValueError) as error:
                raise EngineFault(f"the reference forward failed: {error}") from error
        values = np.concatenate([*rows, np.empty((0, work.scheme.width), np.float32)])
        finite = np.isfinite(values).all(axis=1)
        kept = tuple(nonce for nonce, good in zip(nonces, finite, strict=True) if good)
        failed = tuple(nonce for nonce, good in zip(nonces, finite, strict=True) if not good)
        return ProofBatch(kept, values[finite], failed)

    def _forward(self, work: Workload, nonces: Sequence[int]) -> NDArray[np.float32]:
        padded = pad(nonces, self._forward_batch)
        values = self._network.values(self._block(work), work.public_key, padded, work.seq_len)
        rows: NDArray[np.float32] = values[: len(nonces)].cpu().numpy()
        return rows

    def _block(self, work: Workload) -> BlockScheme:
        key = work.scheme, work.block_hash
        if key not in self._blocks:
            network = self._network
            self._blocks[key] = work.scheme.for_block(
                work.block_hash, network.hidden_size, network.device
            )
            if len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        return self._blocks[key]

    @asynccontextmanager
    async def _session(self, work: Workload) -> AsyncIterator["ReferenceSession"]:
        yield ReferenceSession(self, work)


class ReferenceSession:
    """The proofs of one workload."""

    def __init__(self, engine: ReferenceEngine, work: Workload) -> None:
        self._engine = engine
        self._work = work

    async def prove(self, nonces: Sequence[int]) -> ProofBatch:
        """See ``rounds.ports.ProofSession.prove``; never deferred."""
        return await asyncio.to_thread(self._engine.compute, self._work, nonces)
