"""Proofs where kernels know smaller blocks than the KV pool, in a process of its own.

On GPUs some attention backends do; on a CPU none does, so the CPU's backend is told that it knows
blocks of 32 tokens alone. Usage: split_blocks.py MODEL VECTORS. Writes vectors of nonces 0..15 in
the file VECTORS (npy), and prints the size of the kernel's blocks as one line of JSON.
"""

import json
import sys
from typing import Any

import numpy as np
from vllm import LLM
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from proofserve.engines.vllm.inprocess import SyncProver
from proofserve.rounds.records import ProofBatch
from support.engines import workload

KERNEL_BLOCK = 32


def kernel_blocks(worker: Any) -> list[int]:
    runner = worker.model_runner
    return [group.kernel_block_size for groups in runner.attn_groups for group in groups]


def main(model: str, out: str) -> list[int]:
    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(  # type: ignore[assignment]
        lambda _spec=None: [KERNEL_BLOCK]
    )
    llm = LLM(model=model, dtype="float32", enforce_eager=True, max_model_len=1024, block_size=64)
    # Chat leaves other keys and values in the blocks that proofs take.
    llm.generate([{"prompt_token_ids": list(range(300, 500))}] * 8, use_tqdm=False)
    batch = SyncProver(llm.llm_engine).prove(workload(), range(16))
    assert isinstance(batch, ProofBatch)
    np.save(out, batch.values)
    (found,) = llm.collective_rpc(kernel_blocks)
    return list(found)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2])))
