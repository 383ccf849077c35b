"""What a worker keeps between proof forwards, and the one call that reaches it."""

from collections import OrderedDict
from typing import Any

import torch

from proofserve.engines.vllm.forward import run_forward
from proofserve.engines.vllm.wire import Forward, proved
from proofserve.protocol.scheme import BlockScheme
from proofserve.protocol.schemes import from_wire


class BlockCache:
    """The block-dependent parts of recent schemes; some are large and cost a second to draw."""

    def __init__(self, capacity: int = 4) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[tuple[object, str], BlockScheme] = OrderedDict()

    def get(self, forward: Forward, hidden_size: int, device: torch.device) -> BlockScheme:
        """The scheme of ``forward`` bound to its block, built once."""
        key = (tuple(sorted(forward.scheme.items())), forward.block_hash)
        block = self._blocks.pop(key, None)
        if block is None:
            scheme = from_wire(forward.scheme)
            block = scheme.for_block(forward.block_hash, hidden_size, device)
        self._blocks[key] = block
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)
        return block


def prove(worker: Any, forward: Forward) -> dict[str, Any] | None:
    """Run ``forward`` on this rank; the rank that speaks for the output returns the values.

    The reply lists the nonces whose row was not finite; their rows are left out.
    """
    runner = worker.model_runner
    if not hasattr(worker, "proofserve_blocks"):
        worker.proofserve_blocks = BlockCache()
    hidden_size = runner.model_config.get_hidden_size()
    block = worker.proofserve_blocks.get(forward, hidden_size, torch.device(runner.device))
    values = run_forward(runner, block, forward)
    if values is None:
        return None
    finite = torch.isfinite(values).all(dim=1)
    failed = [n for n, good in zip(forward.nonces, finite.tolist(), strict=True) if not good]
    return proved(values[finite].cpu().numpy(), failed, len(forward.nonces))
