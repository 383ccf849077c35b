"""Proofs by networks, several nonces in a forward, and several networks side by side."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from proofserve.engines import CheckpointError
from proofserve.engines.reference.forward import NetworkForward, Passed, last_states
from proofserve.engines.reference.network import Network
from proofserve.engines.reference.routing import ChoiceOfExperts, seeded_experts
from proofserve.protocol.scheme import BlockScheme
from proofserve.rounds.computation import chunks
from proofserve.rounds.errors import EngineFault
from proofserve.rounds.records import ProofBatch, Workload


@dataclass(slots=True)
class Run:
    """What one network computes. ``experts`` chooses those of a mixture, if the block does not.

    ``public_key`` is that of the nonces, None for that of the work. ``seconds`` are those that its
    layers took, in equal parts where several runs have one network.
    """

    network: Network
    nonces: Sequence[int]
    experts: ChoiceOfExperts | None = None
    public_key: str | None = None
    seconds: float = 0.0


class ReferenceEngine:
    """Recomputes proofs, up to ``forward_batch`` nonces in a forward.

    How many they are may change the last bits of a vector, as another order of summation does.
    ``passed`` is as in ``last_states``.
    """

    def __init__(self, forward_batch: int, passed: Passed = lambda _index, _of: None) -> None:
        self._forward_batch = forward_batch
        self._passed = passed
        # Only the last one is kept: in the distance protocol it has a matrix of 8192 rows.
        self._block = lru_cache(maxsize=1)(lambda scheme, *bound_to: scheme.for_block(*bound_to))

    def compute(self, work: Workload, network: Network, nonces: Sequence[int]) -> ProofBatch:
        """The proofs of ``nonces``, any number of them. Raises as ``compute_all``."""
        (batch,) = self.compute_all(work, [Run(network, nonces)])
        return batch

    def compute_all(self, work: Workload, runs: Sequence[Run]) -> list[ProofBatch]:
        """The proofs of each run, of networks with the same facts; blocks until all are computed.

        Raises EngineFault if a forward fails or a model cannot do ``work``.
        """
        for run in runs:
            require_length(work, run.network)
        some = [run for run in runs if run.nonces]
        try:
            network = runs[0].network
            block = self._block(work.scheme, work.block, network.facts, network.device)
            made = proof_values(
                block, work.public_key, work.seq_len, some, self._forward_batch, self._passed
            )
        except (RuntimeError, ValueError, CheckpointError) as error:
            raise EngineFault(f"the reference forward failed: {error}") from error
        rows = iter(made)
        nothing = np.empty((0, work.scheme.width), np.float32)
        return [_checked(run.nonces, next(rows) if run.nonces else nothing) for run in runs]


def require_length(work: Workload, network: Network) -> None:
    """Raise EngineFault if sequences of ``work`` are longer than the model allows."""
    if work.seq_len > (limit := network.max_seq_len):
        raise EngineFault(f"seq_len {work.seq_len} exceeds the model's {limit}")


@torch.inference_mode()
def proof_values(
    block: BlockScheme,
    public_key: str,
    seq_len: int,
    runs: Sequence[Run],
    forward_batch: int,
    passed: Passed = lambda _index, _of: None,
) -> list[NDArray[np.float32]]:
    """Proof values float32 [nonces, width] of each run, bad rows as NaN.

    Runs of one network are one forward, with the experts of the first, so that each of its layers
    is changed once for all of them. ``passed`` is as in ``last_states``. Raises as ``last_states``.
    """
    inputs = _inputs(block, public_key, seq_len, runs, forward_batch)
    transform = block.layer_transform if block.uses_layer_transforms else None
    together: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        together[id(run.network)].append(run)
    forwards, parts = [], []
    for of in together.values():
        network = of[0].network
        batches = [
            (run, run.public_key or public_key, part)
            for run in of
            for part in chunks(run.nonces, forward_batch)
        ]
        read = (torch.cat([inputs[key, nonce] for nonce in part]) for _, key, part in batches)
        experts = seeded_experts(network, block, seq_len) or of[0].experts
        forwards.append(NetworkForward(network, read, transform, experts))
        parts.append(batches)
    found: dict[int, list[NDArray[np.float32]]] = defaultdict(list)
    for batches, last in zip(parts, last_states(forwards, passed), strict=True):
        for (run, key, part), states in zip(batches, last, strict=True):
            read_by_scheme = states if block.reads_every_position else states[:, -1]
            found[id(run)].append(block.finish(key, part, read_by_scheme).cpu().numpy())
    for of, forward in zip(together.values(), forwards, strict=True):
        for run in of:
            run.seconds = forward.seconds / len(of)
    return [np.concatenate(found[id(run)]) for run in runs]


def _inputs(
    block: BlockScheme, public_key: str, seq_len: int, runs: Sequence[Run], forward_batch: int
) -> dict[tuple[str, int], Tensor]:
    """What every network reads for a key's nonce, made once: one sequence, or those of twins."""
    every: dict[str, dict[int, None]] = {}
    for run in runs:
        every.setdefault(run.public_key or public_key, {}).update(dict.fromkeys(run.nonces))
    found: dict[tuple[str, int], Tensor] = {}
    for key, nonces in every.items():
        for part in chunks(tuple(nonces), forward_batch):
            made = block.inputs(key, part, seq_len, runs[0].network.dtype)
            found |= zip(((key, nonce) for nonce in part), made.chunk(len(part)), strict=True)
    return found


def _checked(nonces: Sequence[int], values: NDArray[np.float32]) -> ProofBatch:
    finite = np.asarray(np.isfinite(values).all(axis=1))
    kept = tuple(nonce for nonce, good in zip(nonces, finite, strict=True) if good)
    failed = tuple(nonce for nonce, good in zip(nonces, finite, strict=True) if not good)
    return ProofBatch(kept, values[finite], failed)
