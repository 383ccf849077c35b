"""The same vectors without vLLM: plain transformers on the CPU, then the scheme's own finish."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from proofserve.rounds.records import Workload


@torch.inference_mode()
def reference_vectors(
    model: Path, work: Workload, nonces: range, dtype: torch.dtype
) -> NDArray[np.float32]:
    """Vectors float32 [len(nonces), width] of a checkpoint whose forward runs in ``dtype``."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    block = work.scheme.for_block(work.block_hash, network.config.hidden_size, torch.device("cpu"))
    inputs = block.inputs(work.public_key, nonces, work.seq_len, dtype)
    hidden = network.model(inputs_embeds=inputs, use_cache=False).last_hidden_state
    return block.finish(work.public_key, nonces, hidden[:, -1]).numpy()
