"""The same vectors without vLLM, by the reference engine."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from proofserve.engines.reference.engine import ReferenceEngine
from proofserve.engines.reference.network import load
from proofserve.rounds.records import Workload


def reference_vectors(
    model: Path, work: Workload, nonces: range, dtype: torch.dtype
) -> NDArray[np.float32]:
    """Vectors float32 [len(nonces), width] of a checkpoint whose forward runs in ``dtype``."""
    network = load(model, str(dtype).removeprefix("torch."), "cpu")
    return ReferenceEngine(8).compute(work, network, nonces).values
