"""The same vectors without vLLM, by the reference engine."""

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.network import Network, load
from proofserve.rounds.records import ProofBatch, Workload


class Prover:
    """Proves with one network, for one thread at a time: its layers hold what they work on."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._engine = ReferenceEngine(8)
        self._one_at_a_time = threading.Lock()

    def compute(self, work: Workload, nonces: Sequence[int]) -> ProofBatch:
        with self._one_at_a_time:
            return self._engine.compute(work, self._network, nonces)


def reference_vectors(
    model: Path, work: Workload, nonces: range, dtype: torch.dtype
) -> NDArray[np.float32]:
    """Vectors float32 [len(nonces), width] of a checkpoint whose forward runs in ``dtype``."""
    network = load(model, str(dtype).removeprefix("torch."), "cpu")
    return Prover(network).compute(work, nonces).values
